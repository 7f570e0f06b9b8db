-- SPDX-License-Identifier: Apache-2.0
-- TPC-C 2.8, by its statements.
\set w random(1, :rows)
\set d random(1, 10)
\set threshold random(10, 20)
begin;
select d_next_o_id as next from district where d_w_id = :w and d_id = :d \gset
select count(distinct s_i_id) from order_line join stock on s_w_id = ol_w_id and s_i_id = ol_i_id
where ol_w_id = :w and ol_d_id = :d and ol_o_id between :next - 20 and :next - 1 and s_quantity < :threshold;
commit;
