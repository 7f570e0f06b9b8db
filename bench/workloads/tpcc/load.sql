-- SPDX-License-Identifier: Apache-2.0
-- What the scripts need beside go-tpc's tables: a customer's last name by its number, from three syllables (TPC-C 4.3.2.3).
create or replace function last_name(number int) returns text immutable language sql return
    (array['BAR', 'OUGHT', 'ABLE', 'PRI', 'PRES', 'ESE', 'ANTI', 'CALLY', 'ATION', 'EING'])[number / 100 + 1]
    || (array['BAR', 'OUGHT', 'ABLE', 'PRI', 'PRES', 'ESE', 'ANTI', 'CALLY', 'ATION', 'EING'])[number / 10 % 10 + 1]
    || (array['BAR', 'OUGHT', 'ABLE', 'PRI', 'PRES', 'ESE', 'ANTI', 'CALLY', 'ATION', 'EING'])[number % 10 + 1];
