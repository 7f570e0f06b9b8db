-- SPDX-License-Identifier: Apache-2.0
\set location random(0, 2147483647)
\set subscriber random(1, :rows)
begin;
select s_id as id from subscriber where sub_nbr = lpad(:subscriber::text, 15, '0') \gset
update subscriber set vlr_location = :location where s_id = :id;
commit;
