-- SPDX-License-Identifier: Apache-2.0
\set aid random(1, :rows)
select abalance from pgbench_accounts where aid = :aid;
