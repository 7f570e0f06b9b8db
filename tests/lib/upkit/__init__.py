# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the cross-crate suites under tests/: real PostgreSQL, real poolers, a small protocol 3 client.

Only the standard library is used, so that the acceptance suite (tests/compat) runs on a bare machine that has
PostgreSQL and a pooler. Every fixture owns its processes and directories and removes them in `close()`.
"""
