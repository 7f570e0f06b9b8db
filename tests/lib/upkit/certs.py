# SPDX-License-Identifier: Apache-2.0
"""A throw-away certificate authority, made with the openssl command."""

import os
import secrets
import shutil
import subprocess

from . import host


class Certificates:
    """A CA, a server certificate (localhost, 127.0.0.1) and client certificates in one directory.

    `ca`, `server_cert`, `server_key` are paths. Keys belong to the service user, mode 0600, as PostgreSQL asks.
    """

    def __init__(self, directory):
        self.directory = directory
        self.ca = self._path("ca.crt")
        self._ca_key = self._path("ca.key")
        # P-256: a key in a millisecond, where RSA takes a second on a busy machine.
        self._openssl("req", "-x509", *self._new_key(self._ca_key), "-out", self.ca, "-days", "2",
                      "-subj", "/CN=underpass test CA")
        self.server_cert, self.server_key = self.issue("server", "localhost",
                                                       "subjectAltName=DNS:localhost,IP:127.0.0.1")

    def issue(self, file, common_name, extension="basicConstraints=CA:FALSE"):
        """A certificate signed by our CA; returns the paths of certificate and key."""
        cert, key, request = self._path(file + ".crt"), self._path(file + ".key"), self._path(file + ".csr")
        extensions = self._path(file + ".ext")
        with open(extensions, "w", encoding="utf-8") as out:
            out.write(extension + "\n")
        self._openssl("req", *self._new_key(key), "-out", request, "-subj", f"/CN={common_name}")
        self._openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._ca_key,
                      # Not from a serial file: checks issue certificates at the same time.
                      "-set_serial", str(secrets.randbits(63)), "-days", "2", "-extfile", extensions, "-out", cert)
        os.chmod(key, 0o600)
        for path in (cert, key):
            host.own(path)
        return cert, key

    def close(self):
        """Removes the directory."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _path(self, name):
        return os.path.join(self.directory, name)

    @staticmethod
    def _new_key(path):
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]

    @staticmethod
    def _openssl(*args):
        subprocess.run(["openssl", *args], check=True, capture_output=True, text=True)
