-- SPDX-License-Identifier: Apache-2.0
\set customer random(0, :rows - 1)
begin;
select custid from accounts where name = lpad(:customer::text, 64, '0') \gset
update checking set bal = bal + 1.3 where custid = :custid;
commit;
