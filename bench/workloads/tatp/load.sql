-- SPDX-License-Identifier: Apache-2.0
-- TATP as in BenchBase. Call forwarding starts at 0, 8 or 6 o'clock: that is BenchBase's loader, the specification says 16.
drop table if exists call_forwarding, special_facility, access_info, subscriber;
create table subscriber (
    s_id int primary key, sub_nbr varchar(15) not null unique,
    bit_1 smallint, bit_2 smallint, bit_3 smallint, bit_4 smallint, bit_5 smallint, bit_6 smallint, bit_7 smallint, bit_8 smallint, bit_9 smallint, bit_10 smallint,
    hex_1 smallint, hex_2 smallint, hex_3 smallint, hex_4 smallint, hex_5 smallint, hex_6 smallint, hex_7 smallint, hex_8 smallint, hex_9 smallint, hex_10 smallint,
    byte2_1 smallint, byte2_2 smallint, byte2_3 smallint, byte2_4 smallint, byte2_5 smallint, byte2_6 smallint, byte2_7 smallint, byte2_8 smallint, byte2_9 smallint, byte2_10 smallint,
    msc_location int, vlr_location int
);
create table access_info (
    s_id int not null, ai_type smallint not null, data1 smallint, data2 smallint, data3 varchar(3), data4 varchar(5),
    primary key (s_id, ai_type)
);
create table special_facility (
    s_id int not null, sf_type smallint not null, is_active smallint not null, error_cntrl smallint, data_a smallint,
    data_b varchar(5), primary key (s_id, sf_type)
);
create table call_forwarding (
    s_id int not null, sf_type smallint not null, start_time smallint not null, end_time smallint, numberx varchar(15),
    primary key (s_id, sf_type, start_time)
);
insert into subscriber
select g, lpad(g::text, 15, '0'),
    (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int, (random() * 1)::int,
    floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16), floor(random() * 16),
    floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256), floor(random() * 256),
    floor(random() * 2147483647), floor(random() * 2147483647)
from generate_series(1, :rows) as g;
-- One to four distinct types per subscriber: a random permutation cut at a random length.
insert into access_info
select g, kinds[n], floor(random() * 256), floor(random() * 256), upper(left(md5(random()::text), 3)),
    upper(left(md5(random()::text), 5))
from (select g, (select array_agg(k order by random()) from generate_series(1, 4) as k where g > 0) as kinds,
             1 + floor(random() * 4)::int as many
      from generate_series(1, :rows) as g) as chosen, lateral generate_series(1, many) as n;
insert into special_facility
select g, kinds[n], (random() < 0.85)::int, floor(random() * 256), floor(random() * 256),
    upper(left(md5(random()::text), 5))
from (select g, (select array_agg(k order by random()) from generate_series(1, 4) as k where g > 0) as kinds,
             1 + floor(random() * 4)::int as many
      from generate_series(1, :rows) as g) as chosen, lateral generate_series(1, many) as n;
insert into call_forwarding
select s_id, sf_type, starts[n], starts[n] + 1 + floor(random() * 8), lpad(floor(random() * 1e15)::bigint::text, 15, '0')
from (select s_id, sf_type,
             (select array_agg(k order by random()) from unnest(array[0, 8, 6]) as k where s_id > 0) as starts,
             floor(random() * 4)::int as many
      from special_facility) as chosen, lateral generate_series(1, many) as n;
create index idx_cf on call_forwarding (s_id);
alter table access_info add foreign key (s_id) references subscriber (s_id);
alter table special_facility add foreign key (s_id) references subscriber (s_id);
alter table call_forwarding add foreign key (s_id, sf_type) references special_facility (s_id, sf_type);
vacuum analyze subscriber, access_info, special_facility, call_forwarding;
