-- SPDX-License-Identifier: Apache-2.0
\set subscriber random(1, :rows)
select * from subscriber where s_id = :subscriber;
