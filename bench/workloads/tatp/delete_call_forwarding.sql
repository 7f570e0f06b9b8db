-- SPDX-License-Identifier: Apache-2.0
\set subscriber random(1, :rows)
\set kind random(1, 4)
\set start 8 * random(0, 2)
begin;
select s_id as id from subscriber where sub_nbr = lpad(:subscriber::text, 15, '0') \gset
delete from call_forwarding where s_id = :id and sf_type = :kind and start_time = :start;
commit;
