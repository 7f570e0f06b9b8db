-- SPDX-License-Identifier: Apache-2.0
-- TPC-C 2.4, by its statements. One order in ten has one line from another warehouse, which is one line in a hundred.
\set w random(1, :rows)
\set d random(1, 10)
\set c ((random(0, 1023) | random(1, 3000)) + 259) % 3000 + 1
\set lines random(5, 15)
\set far case when :rows > 1 and random(1, 10) = 1 then random(1, :lines) else 0 end
\set all_local case when :far = 0 then 1 else 0 end
begin;
select c_discount, c_last, c_credit, w_tax from customer join warehouse on w_id = c_w_id
where c_w_id = :w and c_d_id = :d and c_id = :c;
select d_next_o_id as o, d_tax from district where d_w_id = :w and d_id = :d for update \gset
update district set d_next_o_id = d_next_o_id + 1 where d_w_id = :w and d_id = :d;
insert into orders (o_id, o_d_id, o_w_id, o_c_id, o_entry_d, o_ol_cnt, o_all_local)
values (:o, :d, :w, :c, current_timestamp, :lines, :all_local);
insert into new_order (no_o_id, no_d_id, no_w_id) values (:o, :d, :w);
-- {{each n 1 15}}
\if :lines >= {{n}}
\set item ((random(0, 8191) | random(1, 100000)) + 7911) % 100000 + 1
\set supply case when :far = {{n}} then (:w + random(0, :rows - 2)) % :rows + 1 else :w end
\set quantity random(1, 10)
select i_price as price, i_name, i_data from item where i_id = :item \gset
select s_quantity, s_data, (array[s_dist_01, s_dist_02, s_dist_03, s_dist_04, s_dist_05,
    s_dist_06, s_dist_07, s_dist_08, s_dist_09, s_dist_10])[:d] as dist
from stock where s_w_id = :supply and s_i_id = :item for update \gset
update stock set
    s_quantity = s_quantity - :quantity + case when s_quantity >= :quantity + 10 then 0 else 91 end,
    s_ytd = s_ytd + :quantity, s_order_cnt = s_order_cnt + 1, s_remote_cnt = s_remote_cnt + (:supply <> :w)::int
where s_w_id = :supply and s_i_id = :item;
insert into order_line (ol_o_id, ol_d_id, ol_w_id, ol_number, ol_i_id, ol_supply_w_id, ol_quantity, ol_amount, ol_dist_info)
values (:o, :d, :w, {{n}}, :item, :supply, :quantity, :quantity * :price, ':dist');
\endif
-- {{end}}
-- One in a hundred asks for an item that there is not, and takes all back.
\set unknown random(1, 100)
\if :unknown = 1
rollback;
\else
commit;
\endif
