-- SPDX-License-Identifier: Apache-2.0
\set customer random(0, :rows - 1)
begin;
select custid from accounts where name = lpad(:customer::text, 64, '0') \gset
select bal as savings from savings where custid = :custid \gset
select bal as checking from checking where custid = :custid \gset
\set amount case when :savings + :checking < 5.0 then 4.0 else 5.0 end
update checking set bal = bal - :amount where custid = :custid;
commit;
