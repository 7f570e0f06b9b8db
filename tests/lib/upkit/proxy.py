# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that keeps every byte it forwards: what a client really sent, seen by nobody else's code."""

import contextlib
import socket
import threading

CHUNK = 1 << 18


class Connection:
    """One client. `port` is the proxy's own end towards the server, by which the server knows the client."""

    def __init__(self, port):
        self.port = port
        self.to_server, self.to_client = bytearray(), bytearray()


class Proxy:
    """Listens on 127.0.0.1 and forwards to a port of the same address; `connections` are in the order they came."""

    def __init__(self, server_port):
        self.server_port = server_port
        self.connections, self.threads = [], []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self.listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server_port))
                connection = Connection(server.getsockname()[1])
                self.connections.append(connection)
                self._start(self._forward, client, server, connection.to_server)
                self._start(self._forward, server, client, connection.to_client)

    @staticmethod
    def _forward(source, target, kept):
        """Until either end is gone; then the other direction ends as well, as it would without a proxy."""
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                # Kept first: what the server has seen is in the list.
                kept += data
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        """Ends all connections; what they forwarded stays."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(20)
