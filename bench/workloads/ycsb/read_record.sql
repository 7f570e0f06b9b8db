\set key permute(random_zipfian(1, :rows, 1.001) - 1, :rows)
select * from usertable where ycsb_key = :key;
