-- SPDX-License-Identifier: Apache-2.0
-- The table of load.sql for MariaDB: keys 0 to rows - 1, ten fields of 100 characters, 1 KB a row.
drop table if exists usertable;
create table usertable (
    ycsb_key int primary key,
    field1 text, field2 text, field3 text, field4 text, field5 text,
    field6 text, field7 text, field8 text, field9 text, field10 text
) engine = innodb;
insert into usertable
select seq, f, f, f, f, f, f, f, f, f, f
from (select seq, substr(repeat(md5(seq), 4), 1, 100) as f from {{keys}}) as made;
analyze table usertable;
