-- SPDX-License-Identifier: Apache-2.0
\set user random(1, :rows - 1)
begin;
select f2 from followers where f1 = :user limit 20;
select uid, name from user_profiles where uid in (select f2 from followers where f1 = :user limit 20);
commit;
