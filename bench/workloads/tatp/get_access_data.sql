-- SPDX-License-Identifier: Apache-2.0
\set subscriber random(1, :rows)
\set kind random(1, 4)
select data1, data2, data3, data4 from access_info where s_id = :subscriber and ai_type = :kind;
