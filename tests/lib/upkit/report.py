# SPDX-License-Identifier: Apache-2.0
"""Results of a suite: one line per check, expected differences as data, a last line `N passed, N failed`."""

import json
import os
import threading
import time


class Differences:
    """Checks that a given pooler is known not to pass, with the reason.

    Tab-separated file: pooler (see `applies`), check (may end in *), reason. A listed check that passes is a failure too, so that
    the list stays true.
    """

    def __init__(self, path, which):
        self.exact, self.prefixes = {}, []
        if not os.path.exists(path):
            return
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or line.startswith("#"):
                    continue
                parts = line.rstrip("\n").split("\t")
                if len(parts) != 3:
                    raise ValueError(f"{path}:{number}: expected pooler, check, reason separated by tabs")
                pooler, check, reason = parts
                if not applies(pooler, which):
                    continue
                if check.endswith("*"):
                    self.prefixes.append((check[:-1], reason))
                else:
                    self.exact[check] = reason

    def reason(self, check):
        """Why this check is expected to fail; None when it must pass."""
        if check in self.exact:
            return self.exact[check]
        return next((reason for prefix, reason in self.prefixes if check.startswith(prefix)), None)

    def is_exact(self, check):
        """False when only a prefix names it: then passing is allowed."""
        return check in self.exact


def applies(pattern, which):
    """Whether a line's pooler means `which`: "pgbouncer" is any version, "pgbouncer-1.18" one, "<" older ones."""
    if pattern == which or which.startswith(pattern + "-"):
        return True
    if "<" not in pattern or "-" not in which:
        return False
    (name, limit), (kind, version) = pattern.split("<"), which.split("-")
    return kind == name and [int(n) for n in version.split(".")] < [int(n) for n in limit.split(".")]


class Report:
    """Collects results; prints failures as they come, a table and the count at the end."""

    def __init__(self, suite, which, differences=None, out=None, verbose=False):
        self.suite, self.which, self.differences = suite, which, differences
        self.verbose = verbose
        self.results = []
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.out = open(out, "w", encoding="utf-8") if out else None

    def add(self, check, error=None, seconds=0.0):
        """Records one check; `error` None is a pass. Returns the outcome: pass, fail, expected, unexpected."""
        reason = self.differences.reason(check) if self.differences else None
        if error is None:
            outcome = "unexpected" if reason and self.differences.is_exact(check) else "pass"
        else:
            outcome = "expected" if reason else "fail"
        entry = {"suite": self.suite, "pooler": self.which, "check": check, "outcome": outcome,
                 "seconds": round(seconds, 3)}
        if error is not None:
            entry["error"] = str(error)[:2000]
        if reason:
            entry["reason"] = reason
        with self.lock:
            self.results.append(entry)
            if self.out:
                self.out.write(json.dumps(entry) + "\n")
                self.out.flush()
            if outcome == "fail":
                print(f"FAIL {check}: {str(error).strip()[:1500]}", flush=True)
            elif outcome == "unexpected":
                print(f"FAIL {check}: passes, but is listed as a difference: {reason}", flush=True)
            elif self.verbose:
                print(f"{outcome:5} {check} {seconds:.2f}s", flush=True)
        return outcome

    def finish(self, group=lambda check: check.split("/")[0]):
        """Prints the table per group, the expected differences and the last line; returns the exit code."""
        table = {}
        for entry in self.results:
            row = table.setdefault(group(entry["check"]), {"pass": 0, "expected": 0, "fail": 0})
            row["fail" if entry["outcome"] == "unexpected" else entry["outcome"]] += 1
        print(f"\n{self.suite} against {self.which}, {time.monotonic() - self.started:.0f} s")
        print(f"{'':28} {'passed':>7} {'expected':>9} {'failed':>7}")
        for name, row in table.items():
            print(f"{name:28} {row['pass']:7} {row['expected']:9} {row['fail']:7}")
        expected = [entry for entry in self.results if entry["outcome"] == "expected"]
        if expected:
            print("expected differences:")
            for entry in expected:
                print(f"  {entry['check']}: {entry['reason']}")
        failed = sum(row["fail"] for row in table.values())
        passed = len(self.results) - failed
        # An expected difference is behaviour verified to be as listed: it counts as passed.
        print(f"{passed} passed, {failed} failed")
        if self.out:
            self.out.close()
        return 1 if failed or not self.results else 0
