"""Sealed frames: AES-256-GCM between two workers, with keys of their handshake.

Every worker makes a Curve25519 key pair when it starts; its card, which the launcher's authenticated channel carries,
has the public one. Two workers derive from their pairs one AES key a direction:

    HKDF-SHA256(X25519(own secret, peer's public), salt = both public keys, info = job, epoch, source, target)

The nonce is a counter that the sender raises with every frame that it seals, so none is used twice under a key. It
travels behind the header, and both are authenticated with the payload. A frame that is sent again, when a connection
broke, is the same bytes, as the sender keeps it until its message has arrived. A frame that was recorded and is sent
once more opens, but its header has a message number that has come before, and it is dropped for that.

Cost: about 1.5 µs a frame and 0.1 to 0.2 ns a byte; the GIL is released meanwhile.
"""

from __future__ import annotations

import struct
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

TAG_NBYTES = 16
COUNTER = struct.Struct("<Q")
_ZEROS = bytes(4)
_INFO = struct.Struct("<18sQIII")  # of which protocol; job, epoch, source, target


def key_of(secret: bytes, public: bytes, job: int, epoch: int, source: int, target: int, own: bytes = b"") -> bytes:
    """The key of frames from rank `source` to rank `target`; `secret` is one's, `public` the other's.

    `own`: the public key of `secret`, computed where it is not given. Both ends derive the same.
    """
    mine = X25519PrivateKey.from_private_bytes(secret)
    own = own or mine.public_key().public_bytes_raw()
    shared = mine.exchange(X25519PublicKey.from_public_bytes(public))
    info = _INFO.pack(b"manygrad frames 1", job, epoch, source, target)
    return HKDF(SHA256(), 32, salt=b"".join(sorted((own, public))), info=info).derive(shared)


class Sealer:
    """Seals frames of one direction of one pair of workers."""

    def __init__(self, key: bytes):
        self._gcm = AESGCM(key)
        self._counter = 0

    def next(self) -> bytes:
        """The counter of the next frame, as it travels behind the header."""
        self._counter += 1
        return COUNTER.pack(self._counter)

    def seal(self, head: bytes, payload: Any, into: Any) -> None:
        """Writes the sealed `payload`, `TAG_NBYTES` longer, to `into`. `head`: the header and its `next()`."""
        self._gcm.encrypt_into(_nonce(head), payload, head, into)


class Opener:
    """Opens what a `Sealer` of the same key has sealed."""

    def __init__(self, key: bytes):
        self._gcm = AESGCM(key)

    def open(self, head: Any, sealed: Any, into: Any) -> bool:
        """Writes the payload to `into` (which may be the beginning of `sealed`); False where anything was changed."""
        if len(head) < COUNTER.size or len(sealed) != len(into) + TAG_NBYTES:
            return False
        try:
            self._gcm.decrypt_into(_nonce(head), sealed, head, into)
        except InvalidTag:
            return False
        return True


def _nonce(head: Any) -> bytes:
    """12 bytes: four of 0, then the counter."""
    return _ZEROS + bytes(head[-COUNTER.size :])
