# SPDX-License-Identifier: Apache-2.0
"""What the Python clients share: settings from the environment, one result line per check."""

import asyncio
import inspect
import os
import traceback

HOST, PORT = os.environ["DRIVER_HOST"], int(os.environ["DRIVER_PORT"])
USER, PASSWORD = os.environ["DRIVER_USER"], os.environ["DRIVER_PASSWORD"]
DATABASE, CA, MODE = os.environ["DRIVER_DB"], os.environ["DRIVER_CA"], os.environ["DRIVER_MODE"]
TABLE = os.environ["DRIVER_TABLE"]
LARGE = 16 << 20
# Only the check of this name. The one called `repeated` runs only so.
ONLY = os.environ.get("DRIVER_ONLY")
# How often that executes what it has prepared, on each of two connections.
REPEATS = 5000

CHECKS = []


def check(function):
    """Registers a check; its name is the function's with hyphens. session_* checks need a server of their own."""
    CHECKS.append(function)
    return function


def run():
    """Runs all checks and prints `name<TAB>ok|fail<TAB>message` for each."""
    for function in CHECKS:
        if function.__name__ != ONLY if ONLY else function.__name__ == "repeated":
            continue
        name = function.__name__.replace("_", "-")
        if name.startswith("session-"):
            if MODE == "transaction":
                continue
            name = name[len("session-"):]
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(asyncio.wait_for(function(), 60))
            else:
                function()
            print(f"{name}\tok\t", flush=True)
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)
            where = next((f"{f.name}:{f.lineno}" for f in reversed(line) if "_client" in f.filename), "")
            message = f"{where} {type(error).__name__}: {error}".replace("\n", " ").replace("\t", " ")
            print(f"{name}\tfail\t{message[:600]}", flush=True)
