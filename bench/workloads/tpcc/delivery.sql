-- SPDX-License-Identifier: Apache-2.0
-- TPC-C 2.7, by its statements, all districts in one transaction. A district without a new order is passed over, and so is one
-- whose oldest another delivery has just taken.
\set w random(1, :rows)
\set carrier random(1, 10)
begin;
-- {{each n 1 10}}
with taken as (
    delete from new_order where no_w_id = :w and no_d_id = {{n}}
        and no_o_id = (select min(no_o_id) from new_order where no_w_id = :w and no_d_id = {{n}})
    returning no_o_id
) select coalesce(max(no_o_id), 0) as o from taken \gset
\if :o > 0
update orders set o_carrier_id = :carrier where o_w_id = :w and o_d_id = {{n}} and o_id = :o;
select o_c_id as c from orders where o_w_id = :w and o_d_id = {{n}} and o_id = :o \gset
update order_line set ol_delivery_d = current_timestamp where ol_w_id = :w and ol_d_id = {{n}} and ol_o_id = :o;
select sum(ol_amount) as amount from order_line where ol_w_id = :w and ol_d_id = {{n}} and ol_o_id = :o \gset
update customer set c_balance = c_balance + :amount, c_delivery_cnt = c_delivery_cnt + 1
where c_w_id = :w and c_d_id = {{n}} and c_id = :c;
\endif
-- {{end}}
commit;
