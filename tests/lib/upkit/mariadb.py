# SPDX-License-Identifier: Apache-2.0
"""A private MariaDB server."""

import os
import shutil
import signal
import subprocess

from . import host

INIT = """\
CREATE DATABASE shop;
CREATE USER ann@'%' IDENTIFIED BY 'ann';
GRANT ALL ON *.* TO ann@'%';
"""


def program(name):
    """Path of one of the server's programs."""
    path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if not path:
        raise host.SetupError(f"{name} not found: apt-get install mariadb-server mariadb-client")
    return path


class Mariadb:
    """A server in a temporary directory, on 127.0.0.1. User `ann`, password `ann`, may do everything; database `shop`."""

    def __init__(self):
        self.directory = host.temp_dir("maria")
        self.port = host.free_port()
        self.process = None
        self.env = {**os.environ, "TMPDIR": self.directory, "LC_ALL": "C"}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self):
        data = os.path.join(self.directory, "data")
        user = host.run_as(host.service_user())
        subprocess.run([program("mariadb-install-db"), "--no-defaults", f"--datadir={data}", "--skip-test-db",
                        "--auth-root-authentication-method=normal"], env=self.env, cwd=self.directory, check=True,
                       capture_output=True, **user)
        init = os.path.join(self.directory, "init.sql")
        with open(init, "w", encoding="utf-8") as out:
            out.write(INIT)
        host.own(init)
        self.socket = os.path.join(self.directory, "sock")
        self.log_path = os.path.join(self.directory, "log")
        with open(self.log_path, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [program("mariadbd"), "--no-defaults", f"--datadir={data}", f"--port={self.port}", "--local-infile=1",
                 "--bind-address=127.0.0.1", "--skip-name-resolve", f"--socket={self.socket}", f"--init-file={init}",
                 f"--pid-file={self.directory}/pid", "--max-allowed-packet=64M", "--innodb-flush-log-at-trx-commit=0"],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env, cwd=self.directory, **user)

        def answers():
            if self.process.poll() is not None:
                raise host.SetupError(f"MariaDB did not start:\n{self.log()[-2000:]}")
            asked = subprocess.run([program("mariadb"), "--no-defaults", f"--socket={self.socket}", "--user=ann",
                                    "--password=ann", "-e", "select 1"], capture_output=True, check=False)
            return asked.returncode == 0
        host.wait_until(answers, 90, 0.1, "MariaDB answers")

    def log(self):
        """The server's log so far."""
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def close(self):
        """Stops the server and removes its directory."""
        if self.process:
            host.stop(self.process, signal.SIGTERM)
        shutil.rmtree(self.directory, ignore_errors=True)
