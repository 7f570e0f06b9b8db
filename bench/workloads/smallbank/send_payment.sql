-- SPDX-License-Identifier: Apache-2.0
\set customer random(0, :rows - 1)
\set other (:customer + random(1, :rows - 1)) % :rows
begin;
select * from accounts where custid = :customer;
select * from accounts where custid = :other;
select bal from checking where custid = :customer;
update checking set bal = bal - 5.0 where custid = :customer;
update checking set bal = bal + 5.0 where custid = :other;
commit;
