-- SPDX-License-Identifier: Apache-2.0
-- YCSB: one table, ten fields of 100 characters, 1 KB a row.
drop table if exists usertable;
create table usertable (
    ycsb_key int primary key,
    field1 varchar(100), field2 varchar(100), field3 varchar(100), field4 varchar(100), field5 varchar(100),
    field6 varchar(100), field7 varchar(100), field8 varchar(100), field9 varchar(100), field10 varchar(100)
);
insert into usertable
select g, f, f, f, f, f, f, f, f, f, f
from generate_series(0, :rows - 1) as g,
     lateral (select rpad(md5(g::text), 100, md5((g + 1)::text)) as f) as made;
vacuum analyze usertable;
