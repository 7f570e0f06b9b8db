-- SPDX-License-Identifier: Apache-2.0
-- SmallBank as in BenchBase: accounts, savings and checking, balances from 10,000 to 50,000.
drop table if exists checking, savings, accounts;
create table accounts (custid bigint primary key, name varchar(64) not null);
create table savings (custid bigint primary key, bal float not null);
create table checking (custid bigint primary key, bal float not null);
insert into accounts select g, lpad(g::text, 64, '0') from generate_series(0, :rows - 1) as g;
insert into savings select g, 10000 + floor(random() * 40001) from generate_series(0, :rows - 1) as g;
insert into checking select g, 10000 + floor(random() * 40001) from generate_series(0, :rows - 1) as g;
create index idx_accounts_name on accounts (name);
alter table savings add foreign key (custid) references accounts (custid);
alter table checking add foreign key (custid) references accounts (custid);
vacuum analyze accounts, savings, checking;
