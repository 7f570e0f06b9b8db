# SPDX-License-Identifier: Apache-2.0
"""Where a pooler's transactions were: in which kernel lane, or in user space and why (docs/lanes.md)."""

import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field

from . import host, wire

# Documented as mistakes.
MISTAKES = ("unexplained", "failed")

# Reasons that are the pooler's own doing: a lane could have carried these (crates/testkit/src/account.rs has the same list).
MISSES = ("unread", "unwritten", "behind_lane", "server_unread", "busy", "tap", "link_race", "behind", "idle_link")

# Lanes must carry so much of what they can. Drivers with a pipeline are not offered to a lane while more of them is `unread`, and how often that
# is depends on who gets a processor: over all poolers of a suite 98.1 to 99.9 % on a quiet machine, 93 % beside other suites.
SHARE_MIN = 0.95

# Counts of three commands belong together only when nothing ends between them.
SETTLE_S = 10


@dataclass
class Account:
    """Transactions by lane, those in user space by reason, and all by SHOW TOTALS, which counts by another way."""
    lanes: Counter = field(default_factory=Counter)
    user: Counter = field(default_factory=Counter)
    total: int = 0

    def __str__(self):
        reasons = ", ".join(f"{why} {count}" for why, count in sorted(self.user.items()))
        lanes = "".join(f", {lane} {count}" for lane, count in sorted(self.lanes.items()))
        return (f"{self.total} transactions{lanes}, user {self.user.total()} ({reasons or 'none'}), "
                f"lanes carried {100 * self.share():.1f} % of what they could")

    def share(self):
        """Transactions in lanes over those that a lane could carry."""
        could = self.lanes.total() + sum(self.user[why] for why in MISSES)
        return self.lanes.total() / could if could else 1.0

    def mistakes(self, documented):
        """What is wrong with it, in words; empty where every transaction is explained."""
        found = [f"{count} transactions in user space are {why}" for why, count in self.user.items() if why in MISTAKES]
        found += [f"docs/lanes.md lacks {why}, the reason of {count} transactions"
                  for why, count in self.user.items() if why not in documented]
        if self.lanes.total() + self.user.total() != self.total:
            found.append("lanes and user space do not add up")
        return found


def documented():
    """The first cells of all tables of docs/lanes.md."""
    with open(os.path.join(host.ROOT, "docs", "lanes.md"), encoding="utf-8") as manual:
        return set(re.findall(r"^\| (\w+) \|", manual.read(), re.M))


def _read(conn):
    account = Account()
    for row in conn.dicts("SHOW KERNEL"):
        if row["item"] == "xacts" and (row["kind"], row["name"]) != ("lane", "user"):
            (account.lanes if row["kind"] == "lane" else account.user)[row["name"]] += int(row["value"])
    return account


def of(pooler):
    """The account of a running pooler; None if it has no lanes, or its console cannot be reached."""
    try:
        with pooler.connect("admin", "pgbouncer") as conn:
            deadline = time.monotonic() + SETTLE_S
            while True:
                before = _read(conn)
                totals = {row["name"]: row["value"] for row in conn.dicts("SHOW TOTALS")}
                account = _read(conn)
                if before == account or time.monotonic() > deadline:
                    account.total = int(totals["total_xact_count"])
                    return account if account.lanes else None
    except (wire.PgError, wire.Closed, OSError):
        return None


class Audit:
    """Looks at the accounts of many poolers, where KERNEL_PATH=require."""

    def __init__(self):
        self.wanted = os.environ.get("KERNEL_PATH") == "require"
        self.documented = documented() if self.wanted else set()
        self.asked, self.untold, self.sum = 0, 0, Account()

    def look(self, pooler):
        """Fails for a transaction in user space that nobody explained. Before the pooler ends."""
        if not self.wanted or pooler.which != "underpass":
            return
        account = of(pooler) if pooler.process and pooler.running() else None
        if account is None:
            self.untold += 1
            return
        if getattr(pooler, "forgets_pools", False):
            # SHOW TOTALS goes back when a pool is freed, as PgBouncer's does; SHOW KERNEL does not.
            account.total = max(account.total, account.lanes.total() + account.user.total())
        self.asked += 1
        self.sum.lanes.update(account.lanes)
        self.sum.user.update(account.user)
        self.sum.total += account.total
        mistakes = account.mistakes(self.documented)
        if mistakes:
            raise AssertionError(f"the account is wrong: {'; '.join(mistakes)}: {account}")

    def close(self):
        """Prints one line on all of them; what is wrong with the whole, or None."""
        if not self.wanted:
            return None
        print(f"account: {self.asked} poolers, {self.untold} that had ended or have no lanes: {self.sum}")
        if not self.asked:
            return "KERNEL_PATH=require, and no pooler had kernel lanes"
        return f"lanes carried too little: {self.sum}" if self.sum.share() < SHARE_MIN else None
