-- SPDX-License-Identifier: Apache-2.0
\set user random(1, :rows - 1)
begin;
select f2 from follows where f1 = :user limit 20;
select * from tweets where uid in (select f2 from follows where f1 = :user limit 20);
commit;
