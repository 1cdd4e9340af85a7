"""Who may connect: ZeroMQ asks for each handshake (ZAP, RFC 27), and a key or a password of this run passes."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import zmq

Allowed = dict[tuple[bytes, bytes], int]  # (mechanism, CURVE key or password), and the rank whose they are


def password(token: bytes, source: int, target: int) -> bytes:
    """Password that rank `source` shows rank `target`, whose secret is `token`;
    whoever takes `target`'s place learns nothing else by it."""
    return hmac.digest(token, b"%d to %d" % (source, target), hashlib.sha256).hex().encode()


def answer_zap(requests: zmq.Socket[bytes], allowed: Allowed | None) -> None:
    """Answers what is asked, with the rank whose key it is. Until it is known who is allowed, handshakes wait."""
    while allowed is not None:
        try:
            parts: list[Any] = requests.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        version, request, _domain, _address, _identity, mechanism, *credentials = parts
        rank = allowed.get((mechanism, credentials[-1] if credentials else b""))
        if rank is not None:
            status = [b"200", b"OK", b"%d" % rank, b""]
        else:
            status = [b"400", b"key not of this run", b"", b""]
        requests.send_multipart([version, request, *status])
