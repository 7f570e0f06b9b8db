# SPDX-License-Identifier: Apache-2.0
"""MariaDB's own shell."""

import subprocess
import tempfile

from harness import DATABASE, HOST, PASSWORD, PORT, USER, check, run


def shell(script, *args, ok=True):
    """Runs a script; what it printed."""
    done = subprocess.run(["mariadb", "--no-defaults", f"--host={HOST}", f"--port={PORT}", "--protocol=tcp", "-NB",
                           f"--user={USER}", f"--password={PASSWORD}", f"--database={DATABASE}", "--local-infile=1",
                           "--max-allowed-packet=64M", *args], input=script, text=True, capture_output=True, timeout=120,
                          check=False)
    assert not ok or done.returncode == 0, done.stderr[-400:]
    return done.stdout


@check
def statements_and_comments():
    assert shell("select 1; -- one\nselect 'ä' /* two */;\nselect\n 3;", "--skip-ssl", "--comments") == "1\nä\n3\n"


@check
def errors():
    assert shell("select * from nowhere; select 2;", "--skip-ssl", "--force", ok=False) == "2\n"


@check
def delimiters_and_databases():
    assert shell("delimiter //\nselect 1; select 2//\nuse mysql//\nselect database()//", "--skip-ssl") == "1\n2\nmysql\n"


@check
def a_local_file():
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(b"%d\n" % n for n in range(20_000)))
        file.flush()
        assert shell(f"create or replace table shellfile (a int); load data local infile '{file.name}' into table shellfile;"
                     "select count(*) from shellfile;", "--skip-ssl") == "20000\n"


@check
def a_long_statement():
    assert shell(f"select length('{'x' * 5_000_000}');", "--skip-ssl") == "5000000\n"


run()
