-- SPDX-License-Identifier: Apache-2.0
\set customer random(0, :rows - 1)
\set other (:customer + random(1, :rows - 1)) % :rows
begin;
select * from accounts where custid = :customer;
select * from accounts where custid = :other;
select bal as savings from savings where custid = :customer \gset
select bal as checking from checking where custid = :other \gset
update checking set bal = 0.0 where custid = :customer;
update savings set bal = bal - (:savings + :checking) where custid = :other;
commit;
