-- SPDX-License-Identifier: Apache-2.0
-- The key follows Gray's approximation of a Zipf distribution with theta 0.99, as BenchBase draws it; random_zipfian()
-- of pgbench begins at 1.001. int() rounds, hence the half.
\set u random(0, 999999999) / 1000000000.0
\set uz :u * :zetan
\set key case when :uz < 1 then 0 when :uz < 1 + power(0.5, 0.99) then 1 else int(:rows * power(:eta * :u - :eta + 1, 100.0) - 0.5) end
\set seed random(1, 1000000000)
begin;
select * from usertable where ycsb_key = :key for update;
update usertable set
    field1 = substr(repeat(md5(concat(:seed::text, '1')), 4), 1, 100),
    field2 = substr(repeat(md5(concat(:seed::text, '2')), 4), 1, 100),
    field3 = substr(repeat(md5(concat(:seed::text, '3')), 4), 1, 100),
    field4 = substr(repeat(md5(concat(:seed::text, '4')), 4), 1, 100),
    field5 = substr(repeat(md5(concat(:seed::text, '5')), 4), 1, 100),
    field6 = substr(repeat(md5(concat(:seed::text, '6')), 4), 1, 100),
    field7 = substr(repeat(md5(concat(:seed::text, '7')), 4), 1, 100),
    field8 = substr(repeat(md5(concat(:seed::text, '8')), 4), 1, 100),
    field9 = substr(repeat(md5(concat(:seed::text, '9')), 4), 1, 100),
    field10 = substr(repeat(md5(concat(:seed::text, '10')), 4), 1, 100)
where ycsb_key = :key;
commit;
