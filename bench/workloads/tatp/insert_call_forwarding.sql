-- SPDX-License-Identifier: Apache-2.0
-- BenchBase inserts blindly and counts the error of a missing facility or an existing row as an abort, about 70 % of
-- them; an error would end a pgbench client, so here such an insert does nothing.
\set subscriber random(1, :rows)
\set kind random(1, 4)
\set start 8 * random(0, 2)
\set finish random(1, 24)
begin;
select s_id as id from subscriber where sub_nbr = lpad(:subscriber::text, 15, '0') \gset
select sf_type from special_facility where s_id = :id;
insert into call_forwarding
select s_id, sf_type, :start, :finish, lpad(:subscriber::text, 15, '0') from special_facility where s_id = :id and sf_type = :kind
on conflict do nothing;
commit;
