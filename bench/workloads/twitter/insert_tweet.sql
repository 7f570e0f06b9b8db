-- SPDX-License-Identifier: Apache-2.0
\set user random(1, :rows - 1)
\set seed random(1, 1000000000)
insert into added_tweets (uid, text, createdate) values (:user, left(repeat(md5(:seed::text), 5), 100), now());
