\set key permute(random_zipfian(1, :rows, 1.001) - 1, :rows)
\set seed random(1, 1000000000)
update usertable set
    field1 = rpad(md5(:seed::text), 100, 'a'), field2 = rpad(md5(:seed::text), 100, 'b'),
    field3 = rpad(md5(:seed::text), 100, 'c'), field4 = rpad(md5(:seed::text), 100, 'd'),
    field5 = rpad(md5(:seed::text), 100, 'e'), field6 = rpad(md5(:seed::text), 100, 'f'),
    field7 = rpad(md5(:seed::text), 100, 'g'), field8 = rpad(md5(:seed::text), 100, 'h'),
    field9 = rpad(md5(:seed::text), 100, 'i'), field10 = rpad(md5(:seed::text), 100, 'j')
where ycsb_key = :key;
