-- SPDX-License-Identifier: Apache-2.0
\set tweet random(1, :rows * 40)
select * from tweets where id = :tweet;
