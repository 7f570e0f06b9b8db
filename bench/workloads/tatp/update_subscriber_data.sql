-- SPDX-License-Identifier: Apache-2.0
\set subscriber random(1, :rows)
\set kind random(1, 4)
\set bit random(0, 1)
\set data random(0, 255)
begin;
update subscriber set bit_1 = :bit where s_id = :subscriber;
update special_facility set data_a = :data where s_id = :subscriber and sf_type = :kind;
commit;
