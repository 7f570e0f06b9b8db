-- SPDX-License-Identifier: Apache-2.0
-- TPC-C 2.5, by its statements: 15 % for a customer of another warehouse, 60 % by last name.
\set w random(1, :rows)
\set d random(1, 10)
\set far case when :rows > 1 and random(1, 100) > 85 then 1 else 0 end
\set c_w case when :far = 1 then (:w + random(0, :rows - 2)) % :rows + 1 else :w end
\set c_d case when :far = 1 then random(1, 10) else :d end
\set amount random(100, 500000) / 100.0
\set by_name random(1, 100)
\set last ((random(0, 255) | random(0, 999)) + 173) % 1000
\set c ((random(0, 1023) | random(1, 3000)) + 259) % 3000 + 1
begin;
update warehouse set w_ytd = w_ytd + :amount where w_id = :w;
select w_street_1, w_street_2, w_city, w_state, w_zip, w_name from warehouse where w_id = :w;
update district set d_ytd = d_ytd + :amount where d_w_id = :w and d_id = :d;
select d_street_1, d_street_2, d_city, d_state, d_zip, d_name from district where d_w_id = :w and d_id = :d;
\if :by_name <= 60
select c_id as c from (
    select c_id, row_number() over (order by c_first) as nth, count(*) over () as named
    from customer where c_w_id = :c_w and c_d_id = :c_d and c_last = last_name(:last)
) as namesakes where nth = (named + 1) / 2 \gset
\endif
select c_first, c_middle, c_last, c_street_1, c_street_2, c_city, c_state, c_zip, c_phone, c_since, c_credit, c_credit_lim,
    c_discount, c_balance
from customer where c_w_id = :c_w and c_d_id = :c_d and c_id = :c for update;
update customer set c_balance = c_balance - :amount, c_ytd_payment = c_ytd_payment + :amount, c_payment_cnt = c_payment_cnt + 1,
    c_data = case c_credit
        when 'BC' then left(concat_ws(' ', c_id, c_d_id, c_w_id, :d, :w, :amount, c_data), 500)
        else c_data end
where c_w_id = :c_w and c_d_id = :c_d and c_id = :c;
insert into history (h_c_d_id, h_c_w_id, h_c_id, h_d_id, h_w_id, h_date, h_amount, h_data)
values (:c_d, :c_w, :c, :d, :w, current_timestamp, :amount, 'payment');
commit;
