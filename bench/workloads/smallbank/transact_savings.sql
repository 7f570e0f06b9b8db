-- SPDX-License-Identifier: Apache-2.0
\set customer random(0, :rows - 1)
begin;
select custid from accounts where name = lpad(:customer::text, 64, '0') \gset
select bal from savings where custid = :custid;
update savings set bal = bal - 20.20 where custid = :custid;
commit;
