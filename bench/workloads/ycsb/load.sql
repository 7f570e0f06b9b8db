-- SPDX-License-Identifier: Apache-2.0
-- YCSB as in BenchBase: keys 0 to rows - 1, ten fields of 100 characters, 1 KB a row.
drop table if exists usertable;
create table usertable (
    ycsb_key int primary key,
    field1 text, field2 text, field3 text, field4 text, field5 text,
    field6 text, field7 text, field8 text, field9 text, field10 text
);
insert into usertable
select g, f, f, f, f, f, f, f, f, f, f
from generate_series(0, :rows - 1) as g,
     lateral (select substr(repeat(md5(g::text), 4), 1, 100) as f) as made;
-- Inserted records continue after the loaded ones, whichever client inserts them.
drop sequence if exists usertable_next;
create sequence usertable_next start with :rows;
vacuum analyze usertable;
