-- SPDX-License-Identifier: Apache-2.0
\set subscriber random(1, :rows)
\set kind random(1, 4)
\set start 8 * random(0, 2)
\set finish random(1, 24)
select cf.numberx
from special_facility as sf join call_forwarding as cf using (s_id, sf_type)
where sf.s_id = :subscriber and sf.sf_type = :kind and sf.is_active = 1
    and cf.start_time <= :start and cf.end_time > :finish;
