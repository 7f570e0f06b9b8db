# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL's own regression suite, directly and through session pooling, compared test by test.

pg_regress, its library and the SQL come from Debian's source package, the headers and libraries that they are built
with from postgresql-server-dev: both are fetched when run, with a private apt configuration, into a cache directory. A test counts as passed when its output through the
pooler is the same as directly, or when its difference is in differences.tsv.
"""

import argparse
import difflib
import glob
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "lib"))

from upkit import account, host, pooler, postgres, report

SETTINGS = {"max_prepared_transactions": "10", "max_connections": "150"}
RUN_TIMEOUT_S = 1800


def command(*args, cwd=None, env=None):
    """Runs a step; its output, or SetupError with what it said."""
    done = subprocess.run(args, cwd=cwd, capture_output=True, text=True, check=False,
                          env={**os.environ, **(env or {})})
    if done.returncode:
        raise host.SetupError(f"{' '.join(args)}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


def source_entries():
    """This machine's Debian entries of apt, as source entries."""
    with open("/etc/os-release", encoding="utf-8") as release:
        codename = re.search(r"VERSION_CODENAME=(\w+)", release.read())[1]
    stanzas, lines = [], []
    for file in ["/etc/apt/sources.list", *sorted(glob.glob("/etc/apt/sources.list.d/*"))]:
        if not os.path.exists(file):
            continue
        with open(file, encoding="utf-8") as content:
            text = content.read()
        if file.endswith(".sources"):
            for stanza in re.split(r"\n\s*\n", text):
                if re.search(rf"(?m)^Suites:.*\b{codename}\b", stanza):
                    stanzas.append(re.sub(r"(?m)^Types:.*$", "Types: deb-src", stanza))
        else:
            lines += [re.sub(r"^deb\s", "deb-src ", line) for line in text.splitlines()
                      if re.match(rf"deb\s.*\s{codename}(-\w+)?\s", line)]
    return "\n\n".join(stanzas) + "\n", "\n".join(lines) + "\n"


def fetch(major):
    """Directories (source/src/test/regress, pg_regress' package) of the suite; fetched once."""
    cache = host.cache_dir("regress", major)
    if not glob.glob(os.path.join(cache, "source", "*", "src", "test", "regress")):
        apt = os.path.join(cache, "apt")
        for directory in ("lists/partial", "cache/archives/partial", "parts"):
            os.makedirs(os.path.join(apt, directory), exist_ok=True)
        stanzas, lines = source_entries()
        with open(os.path.join(apt, "parts", "source.sources"), "w", encoding="utf-8") as out:
            out.write(stanzas)
        with open(os.path.join(apt, "sources.list"), "w", encoding="utf-8") as out:
            out.write(lines)
        options = ["-o", f"Dir::Etc::sourcelist={apt}/sources.list", "-o", f"Dir::Etc::sourceparts={apt}/parts", "-o",
                   f"Dir::State::lists={apt}/lists", "-o", f"Dir::Cache={apt}/cache", "-o", "APT::Sandbox::User=root"]
        command("apt-get", *options, "-qq", "update")
        source = host.cache_dir("regress", major, "download")
        shown = command("apt-cache", *options, "showsrc", f"postgresql-{major}")
        refused = []
        # A mirror may list a version before it has its source; any minor version has the suite.
        for version in re.findall(r"(?m)^Version: (\S+)$", shown):
            try:
                command("apt-get", *options, "-qq", "--download-only", "source", f"postgresql-{major}={version}",
                        cwd=source)
                break
            except host.SetupError as error:
                refused.append(f"{version}: {error}")
        else:
            raise host.SetupError(f"no source of postgresql-{major}: {'; '.join(refused)[-600:]}")
        # The upstream archive is enough: Debian's patches do not touch the suite, and dpkg-source may be missing.
        archive = glob.glob(os.path.join(source, "*.orig.tar.*"))[0]
        command("tar", "-xf", archive, "-C", host.cache_dir("regress", major, "source"))
    package = host.cache_dir("regress", major, "package")
    if not os.path.exists(os.path.join(package, "usr")):
        command("apt-get", "-o", "APT::Sandbox::User=root", "download", f"postgresql-server-dev-{major}", cwd=package)
        command("dpkg", "-x", glob.glob(os.path.join(package, "*.deb"))[0], package)
    return glob.glob(os.path.join(cache, "source", "*", "src", "test", "regress"))[0], package


def build_library(suite, package, major):
    """pg_regress, regress.so and the two modules of contrib/spi that triggers need, in one directory."""
    directory = host.cache_dir("regress", major, "lib")
    # The source's own headers first: the package may be of a newer minor version than the running server, and minor
    # versions do add functions. What configure generates comes from the package.
    include = os.path.join(package, "usr/include/postgresql", major, "server")
    own = os.path.join(suite, "..", "..", "include")
    library = os.path.join(directory, "regress.so")
    client = command("pg_config", "--includedir").strip() if shutil.which("pg_config") else "/usr/include/postgresql"
    if not os.path.exists(library):
        command("cc", "-shared", "-fPIC", "-O1", "-w", "-D_GNU_SOURCE", f"-I{own}", f"-I{include}", f"-I{client}", "-o", library,
                os.path.join(suite, "regress.c"))
    program = os.path.join(directory, "pg_regress")
    if not os.path.exists(program):
        # Debian does not ship the program for every version, so it is built from the same source.
        # The build's install paths: overridden by --bindir and --dlpath, but the source includes them.
        with open(os.path.join(directory, "pg_config_paths.h"), "w", encoding="utf-8") as header:
            header.writelines(f'#define {name} ""\n' for name in (
                "PGBINDIR", "PGSHAREDIR", "LIBDIR", "PKGLIBDIR", "DATADIR"))
        archives = os.path.join(package, "usr/lib/postgresql", major, "lib")
        command("cc", "-O1", "-w", "-DFRONTEND", "-D_GNU_SOURCE", '-DHOST_TUPLE="x86_64-linux-gnu"',
                '-DSHELLPROG="/bin/sh"', '-DDLSUFFIX=".so"', f"-I{own}", f"-I{include}", f"-I{client}", f"-I{directory}", f"-I{suite}", "-o", program,
                os.path.join(suite, "pg_regress.c"), os.path.join(suite, "pg_regress_main.c"), f"-L{archives}",
                "-lpgcommon", "-lpgport", "-lm")
    server_lib = os.path.join(os.path.dirname(host.pg_bin().rstrip("/")), "lib")
    for module in ("refint.so", "autoinc.so"):
        shutil.copy(os.path.join(server_lib, module), directory)
    return directory


def defaults(suite):
    """What pg_regress asks for by PGOPTIONS and environment, which differs between minor versions.

    A pooler turns start-up values into SET, so that RESET goes to the server's default instead: as server settings they are the
    same thing.
    """
    with open(os.path.join(suite, "pg_regress.c"), encoding="utf-8") as source:
        text = source.read()
    wanted = {"timezone": r'"PGTZ", "([^"]+)"', "datestyle": r'"PGDATESTYLE", "([^"]+)"',
              "intervalstyle": r"-c intervalstyle=(\w+)"}
    return {name: re.search(pattern, text)[1] for name, pattern in wanted.items()}


def run_suite(name, suite, library, port, schedule):
    """Runs pg_regress against `port`; test -> (status, output), and what it printed."""
    work = host.temp_dir(f"regress-{name}")
    inputs = os.path.join(work, "input")
    shutil.copytree(suite, inputs)
    for path, directories, files in os.walk(work):
        for entry in [path, *(os.path.join(path, e) for e in directories + files)]:
            host.own(entry)
    program = os.path.join(library, "pg_regress")
    done = subprocess.run(
        [program, f"--inputdir={inputs}", f"--outputdir={inputs}", f"--bindir={host.pg_bin().rstrip('/')}",
         f"--dlpath={library}", "--host=127.0.0.1", f"--port={port}", "--user=postgres", "--max-connections=10",
         f"--schedule={inputs}/{schedule}", "--dbname=regression"],
        capture_output=True, text=True, cwd=inputs, timeout=RUN_TIMEOUT_S, check=False,
        env={**os.environ, "LC_ALL": "C", "PGPASSWORD": "x"}, **host.run_as(host.service_user()))
    outcome = {}
    for line in done.stdout.splitlines():
        found = re.match(r"(?:test|    |\s+)\s*(\w+)\s+\.\.\. (ok|FAILED|failed)", line)
        if found:
            path = os.path.join(inputs, "results", found[1] + ".out")
            text = ""
            if os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace") as out:
                    # What differs between any two runs: the port, and the directory of the run.
                    text = re.sub(rf"\b{port}\b", "PORT", out.read()).replace(work, "WORK")
            outcome[found[1]] = (found[2], text)
    shutil.rmtree(work, ignore_errors=True)
    return outcome, done.stdout + done.stderr


def audited(audit, target):
    """What is wrong with the pooler's account, if anything."""
    try:
        audit.look(target)
    except AssertionError as error:
        return error
    return audit.close()


def main():
    parser = argparse.ArgumentParser(prog="tests/regress/run.sh", description=__doc__)
    parser.add_argument("-s", metavar="SCHEDULE", default="parallel_schedule", help="schedule file of the suite")
    parser.add_argument("-o", metavar="FILE", help="results as JSON lines")
    parser.add_argument("-d", metavar="DIRECTORY", help="write a diff of every test that differs")
    parser.add_argument("-v", action="store_true", help="print every test")
    options = parser.parse_args()
    which = pooler.kind()
    if which == "direct":
        raise host.SetupError("POOLER=direct: nothing to compare without a pooler")
    pooler.command(which)
    label = pooler.label(which)
    major = re.search(r"(\d+)", command(host.pg_bin("postgres"), "--version"))[1]
    suite, package = fetch(major)
    library = build_library(suite, package, major)
    differences = report.Differences(os.path.join(HERE, "differences.tsv"), label)
    results = report.Report("regress", label, differences, options.o, options.v)

    server_settings = {**SETTINGS, **defaults(suite)}
    with postgres.Postgres(settings=server_settings, tls=False) as server:
        direct, said = run_suite("direct", suite, library, server.port, options.s)
        if direct.get("test_setup", ("ok",))[0] != "ok" or not direct:
            raise host.SetupError(f"the suite does not work directly: {said[-800:]}")
    with postgres.Postgres(settings=server_settings, tls=False) as server:
        # Roles come and go in the suite, so they are asked from the server; the password is never needed.
        settings = {"pool_mode": "session", "auth_type": "trust", "max_client_conn": 200, "default_pool_size": 100,
                    "ignore_startup_parameters": "options", "auth_user": "postgres",
                    "auth_query": "SELECT rolname, 'x' FROM pg_authid WHERE rolname = $1"}
        with pooler.Pooler({"*": f"host=127.0.0.1 port={server.port}"}, settings, which=which,
                           auth_file='"postgres" "x"\n"admin" "admin"\n') as target:
            pooled, said = run_suite("pooled", suite, library, target.port, options.s)
            if not pooled:
                print(said[-800:], target.log()[-1500:])
            audit = account.Audit()
            if audit.wanted:
                results.add("account", audited(audit, target))
    for test, (status, text) in direct.items():
        error = None
        if test not in pooled:
            error = "did not run through the pooler"
        elif pooled[test][1] != text or (pooled[test][0] == "ok") != (status == "ok"):
            diff = list(difflib.unified_diff(text.splitlines(), pooled[test][1].splitlines(), "direct", "pooled",
                                             lineterm="", n=1))
            if diff:
                error = f"{len(diff)} lines differ:\n" + "\n".join(diff[:12])
            if diff and options.d:
                os.makedirs(options.d, exist_ok=True)
                with open(os.path.join(options.d, test + ".diff"), "w", encoding="utf-8") as out:
                    out.write("\n".join(diff))
            # Both may match expected files that are alternatives of each other.
            if error and status == "ok" and pooled[test][0] == "ok":
                error = None
        results.add(test, error)
    bad = [test for test, (status, _) in direct.items() if status != "ok"]
    print(f"{len(direct)} tests; directly {len(direct) - len(bad)} as expected, not: {' '.join(bad) or 'none'}")
    return results.finish(lambda check: "tests")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except host.SetupError as error:
        print(error, file=sys.stderr)
        print("0 passed, 1 failed")
        sys.exit(1)
