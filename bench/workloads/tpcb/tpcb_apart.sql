-- SPDX-License-Identifier: Apache-2.0
-- TPC-B in which each client has a branch of its own, so that no two wait for each other's rows.
\set home :client_id % (:rows / 100000)
\set aid :home * 100000 + random(1, 100000)
\set bid :home + 1
\set tid :home * 10 + random(1, 10)
\set delta random(-5000, 5000)
begin;
update pgbench_accounts set abalance = abalance + :delta where aid = :aid;
select abalance from pgbench_accounts where aid = :aid;
update pgbench_tellers set tbalance = tbalance + :delta where tid = :tid;
update pgbench_branches set bbalance = bbalance + :delta where bid = :bid;
insert into pgbench_history (tid, bid, aid, delta, mtime) values (:tid, :bid, :aid, :delta, current_timestamp);
commit;
