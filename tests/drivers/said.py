# SPDX-License-Identifier: Apache-2.0
"""What clients said, from the bytes that a proxy kept: written anew from the protocols' manuals, so that it shares no mistake with
the recorder. Each message is what `underpass export -f jsonl` must show of it."""

import base64
import struct

SSL_REQUEST, GSSENC_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
TLS_HANDSHAKE = 0x16


def shown(key, data):
    """A field: text where it is UTF-8."""
    try:
        return {key: data.decode()}
    except UnicodeDecodeError:
        return {f"{key}_base64": base64.b64encode(data).decode()}


def parameter(data):
    """A value of Bind."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


class Body:
    """Reads the fields of a message."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def string(self):
        """Up to a NUL."""
        end = self.data.index(0, self.at)
        text, self.at = self.data[self.at:end], end + 1
        return text

    def number(self, code):
        """By its struct code."""
        (value,) = struct.unpack_from(f">{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def numbers(self, code):
        """As many as a 16-bit count says."""
        return [self.number(code) for _ in range(self.number("H"))]

    def value(self):
        """A length and as many bytes; -1 is NULL."""
        size = self.number("i")
        if size < 0:
            return None
        data, self.at = self.data[self.at:self.at + size], self.at + size
        return data


def target(code):
    """Of Describe and Close."""
    return "statement" if code == b"S" else "portal"


def postgres_message(tag, data):
    """Fields of a frontend message."""
    body = Body(data)
    if tag == b"Q":
        return {"type": "Query", **shown("query", body.string())}
    if tag == b"P":
        name, query = body.string(), body.string()
        return {"type": "Parse", **shown("statement", name), **shown("query", query), "param_types": body.numbers("I")}
    if tag == b"B":
        portal, name, formats = body.string(), body.string(), body.numbers("H")
        values = [parameter(body.value()) for _ in range(body.number("H"))]
        return {"type": "Bind", **shown("portal", portal), **shown("statement", name), "param_formats": formats,
                "params": values, "result_formats": body.numbers("H")}
    if tag == b"E":
        return {"type": "Execute", **shown("portal", body.string()), "max_rows": body.number("I")}
    if tag in (b"D", b"C"):
        kind, body.at = target(data[:1]), 1
        return {"type": "Describe" if tag == b"D" else "Close", "target": kind, **shown("name", body.string())}
    if tag == b"d":
        return {"type": "CopyData", **shown("data", data)}
    if tag == b"f":
        return {"type": "CopyFail", **shown("message", body.string())}
    plain = {b"S": "Sync", b"H": "Flush", b"X": "Terminate", b"c": "CopyDone"}
    if tag in plain:
        return {"type": plain[tag]}
    return {"body_base64": base64.b64encode(data).decode()}


def postgres(connection):
    """Messages after the login, or why there are none: "tls", "cancel" or "nothing"."""
    data, at = bytes(connection.to_server), 0
    while True:
        if data[:1] == bytes([TLS_HANDSHAKE]):
            return "tls"
        if len(data) - at < 8:
            return "nothing"
        size, code = struct.unpack_from(">II", data, at)
        at += size
        if code == CANCEL_REQUEST:
            return "cancel"
        if code not in (SSL_REQUEST, GSSENC_REQUEST):
            break
        if connection.to_client[:1] in (b"S", b"G"):
            return "tls"
    messages = []
    while len(data) - at >= 5:
        tag, (size,) = data[at:at + 1], struct.unpack_from(">I", data, at + 1)
        if len(data) - at < 1 + size:
            break
        # Passwords and SASL are nobody's to keep.
        if tag != b"p":
            messages.append({"len": 1 + size, **postgres_message(tag, data[at + 5:at + 1 + size])})
        at += 1 + size
    return messages


TEXTS = {3: "COM_QUERY", 22: "COM_STMT_PREPARE"}


def mysql(connection):
    """Commands, and the packets of local files, which go on with the numbers of their command."""
    data, at, messages = bytes(connection.to_server), 0, []
    in_session = False
    while len(data) - at >= 4:
        size, number = int.from_bytes(data[at:at + 3], "little"), data[at + 3]
        message = data[at:at + 4 + size]
        at += len(message)
        if len(message) < 4 + size:
            break
        # The greeting has the number 0, so what belongs to the login has others.
        in_session = in_session or number == 0
        if not in_session:
            continue
        if number == 0 and message[4] in TEXTS:
            messages.append({"len": len(message), "type": TEXTS[message[4]], **shown("query", message[5:])})
        else:
            kind = {"type": "file"} if number else {}
            messages.append({"len": len(message), **kind, "message_base64": base64.b64encode(message).decode()})
    return messages or "nothing"
