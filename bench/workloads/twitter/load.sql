-- SPDX-License-Identifier: Apache-2.0
-- Twitter as in BenchBase, of which each user has 40 tweets on average and follows at least one other. Without the index
-- on tweets (uid), which some versions of BenchBase lack, every reading of a user's tweets would scan the table.
drop table if exists added_tweets, tweets, follows, followers, user_profiles;
create table user_profiles (
    uid int primary key, name varchar(255), email varchar(255), partitionid int, partitionid2 smallint, followers int
);
create table followers (f1 int not null, f2 int not null, primary key (f1, f2));
create table follows (f1 int not null, f2 int not null, primary key (f1, f2));
create table tweets (id bigint primary key, uid int not null, text char(140) not null, createdate timestamp);
create table added_tweets (id serial primary key, uid int not null, text char(140) not null, createdate timestamp);
insert into user_profiles
select g, name, name || '@tweeter.com', null, null, null
from generate_series(1, :rows) as g, lateral (select left(md5(g::text), 3 + g % 18) as name) as made;
-- Who is followed is skewed (Zipf, 1.75), and so is how many one follows, up to a tenth of the users; 1 - u to the power
-- -1 / 0.75 is that tail.
insert into follows
select distinct g, 1 + (floor(power(1 - random(), -1 / 0.75)) - 1)::bigint % :rows
from generate_series(1, :rows) as g,
     lateral generate_series(1, least(floor(power(1 - random() + g * 0, -1 / 0.75)), :rows / 10)::int) as n;
delete from follows where f1 = f2;
insert into followers select f2, f1 from follows;
-- Heavy tweeters are others than those who are followed most: the skewed rank is scattered by a multiplication.
insert into tweets
select g, 1 + (floor(power(:rows, random()))::bigint * 2654435761) % :rows, left(repeat(md5(g::text), 5), 20 + g % 120), null
from generate_series(1, :rows * 40) as g;
alter table followers add foreign key (f1) references user_profiles (uid);
alter table followers add foreign key (f2) references user_profiles (uid);
alter table tweets add foreign key (uid) references user_profiles (uid);
alter table added_tweets add foreign key (uid) references user_profiles (uid);
create index idx_user_followers on user_profiles (followers);
create index idx_user_partition on user_profiles (partitionid);
create index idx_tweets_uid on tweets (uid);
create index idx_added_tweets_uid on added_tweets (uid);
vacuum analyze user_profiles, followers, follows, tweets, added_tweets;
