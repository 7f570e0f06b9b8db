-- SPDX-License-Identifier: Apache-2.0
\set seed random(1, 1000000000)
insert into usertable values (nextval('usertable_next'),
    substr(repeat(md5(concat(:seed::text, '1')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '2')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '3')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '4')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '5')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '6')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '7')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '8')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '9')), 4), 1, 100),
    substr(repeat(md5(concat(:seed::text, '10')), 4), 1, 100));
