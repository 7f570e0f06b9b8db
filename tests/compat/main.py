# SPDX-License-Identifier: Apache-2.0
"""Conformance of a pooler with PgBouncer: console, signals, limits, timeouts, authentication, TLS, texts.

Each check has its own pooler process and clean-up; one private PostgreSQL serves all. What PgBouncer 1.18 does not
do yet (the surface described is that of 1.26) is in differences.tsv.
"""

import argparse
import importlib
import os
import queue
import sys
import threading
import time
import traceback

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "lib"), HERE]

import case
from upkit import account, host, pooler, postgres, report


def load_checks():
    """All checks in the order of the files and of their definition."""
    for file in sorted(os.listdir(HERE)):
        if file.startswith("checks_") and file.endswith(".py"):
            importlib.import_module(file[:-3])
    return case.CHECKS


def failure_text(error):
    """Last frame in a check plus the message: enough to find the line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "checks_" in frame.filename]
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].line}" if frames else ""
    return f"{where}: {type(error).__name__}: {error}"


def run_one(check, server, which, keep_logs, audit):
    """Runs one check; returns the error or None."""
    with case.Case(server, which) as current:
        try:
            check.function(current)
            for used in current.poolers:
                audit.look(used)
        except Exception as error:  # a check may fail in any way; the suite goes on
            logs = current.logs() if keep_logs else ""
            return failure_text(error) + logs
    return None


def main():
    parser = argparse.ArgumentParser(prog="tests/compat/run.sh", description=__doc__)
    parser.add_argument("-k", metavar="TEXT", action="append", default=[], help="only checks whose name contains TEXT")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="checks at a time (2)")
    parser.add_argument("-o", metavar="FILE", help="results as JSON lines")
    parser.add_argument("-v", action="store_true", help="print every check")
    parser.add_argument("--logs", action="store_true", help="with a failure, print the end of the pooler's log")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args()

    checks = [c for c in load_checks() if not options.k or any(text in c.name for text in options.k)]
    if options.list:
        print("\n".join(c.name for c in checks))
        return 0
    which = pooler.kind()
    if which == "direct":
        raise host.SetupError("POOLER=direct: there is no console to check without a pooler")
    pooler.command(which)
    label = pooler.label(which)
    differences = report.Differences(os.path.join(HERE, "differences.tsv"), label)
    results = report.Report("compat", label, differences, options.o, options.v)
    audit = account.Audit()
    work = queue.SimpleQueue()
    # Slow checks first, so that no thread is left alone with one at the end.
    for check in sorted(checks, key=lambda c: -c.slow):
        work.put(check)

    with postgres.Postgres() as server:
        def worker():
            while True:
                try:
                    check = work.get_nowait()
                except queue.Empty:
                    return
                start = time.monotonic()
                error = run_one(check, server, which, options.logs, audit)
                results.add(check.name, error, time.monotonic() - start)
        threads = [threading.Thread(target=worker) for _ in range(options.j)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if audit.wanted:
        results.add("lanes/share", audit.close())
    results.results.sort(key=lambda entry: entry["check"])
    return results.finish()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except host.SetupError as error:
        print(error, file=sys.stderr)
        print("0 passed, 1 failed")
        sys.exit(1)
