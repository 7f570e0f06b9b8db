-- SPDX-License-Identifier: Apache-2.0
\set user random(1, :rows - 1)
select * from tweets where uid = :user limit 10;
