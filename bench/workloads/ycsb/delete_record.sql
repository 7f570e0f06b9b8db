-- SPDX-License-Identifier: Apache-2.0
-- The key follows Gray's approximation of a Zipf distribution with theta 0.99, as BenchBase draws it; random_zipfian()
-- of pgbench begins at 1.001. int() rounds, hence the half.
\set u random(0, 999999999) / 1000000000.0
\set uz :u * :zetan
\set key case when :uz < 1 then 0 when :uz < 1 + power(0.5, 0.99) then 1 else int(:rows * power(:eta * :u - :eta + 1, 100.0) - 0.5) end
delete from usertable where ycsb_key = :key;
