-- SPDX-License-Identifier: Apache-2.0
-- TPC-B as pgbench has it: ten tellers and 100,000 accounts per branch; rows counts accounts.
drop table if exists pgbench_history, pgbench_tellers, pgbench_accounts, pgbench_branches;
create table pgbench_branches (bid int primary key, bbalance int, filler char(88)) with (fillfactor = 100);
create table pgbench_tellers (tid int primary key, bid int, tbalance int, filler char(84)) with (fillfactor = 100);
create table pgbench_accounts (aid int primary key, bid int, abalance int, filler char(84)) with (fillfactor = 100);
create table pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
insert into pgbench_branches select g, 0 from generate_series(1, :rows / 100000) as g;
insert into pgbench_tellers select g, 1 + (g - 1) / 10, 0 from generate_series(1, :rows / 10000) as g;
insert into pgbench_accounts select g, 1 + (g - 1) / 100000, 0, '' from generate_series(1, :rows) as g;
vacuum analyze pgbench_branches, pgbench_tellers, pgbench_accounts, pgbench_history;
