"""AES-256-GCM with named keys: the codec that comes with jsworker. Needs the extra ``encryption``."""

import base64
import binascii
import re
import secrets
from collections.abc import Mapping
from typing import Final

from jsworker.core.codec import Codec
from jsworker.core.errors import KeyMissing, SettingsError

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_KEY_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RULE: Final = f"must read NAME:KEY,…, each KEY the base64 form of {_KEY_BYTES} random bytes"


class AesGcmCodec(Codec):
    """Encrypts with the first of its keys and decrypts with all of them.

    A key is good for four billion contents (2³², each with a random nonce of 96 bits): replace it well
    before. The length of contents is not hidden. ``repr`` shows only the names of the keys.
    """

    name = "aes-gcm"

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """Take keys of 32 bytes by their names; the first key encrypts.

        Raises:
            ValueError: there is no key, or a name or a length is not allowed; the message holds no key.
            SettingsError: the library ``cryptography`` is not installed.
        """
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 -- an extra
        except ImportError as error:
            raise SettingsError(
                f"encryption needs the library cryptography: {error}; pip install 'jsworker[encryption]'"
            ) from None
        _check_keys(keys)
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}
        self._first = next(iter(self._ciphers))

    def __repr__(self) -> str:
        return f"AesGcmCodec({', '.join(self._ciphers)})"

    def encode(self, content: bytes, bound_to: bytes) -> tuple[str, bytes]:
        """Return the name of the first key, and nonce, ciphertext and tag."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return self._first, nonce + self._ciphers[self._first].encrypt(nonce, content, bound_to)

    def decode(self, key: str, encoded: bytes, bound_to: bytes) -> bytes:
        """Return the decrypted content; raise KeyMissing, or another error if it was changed or moved."""
        cipher = self._ciphers.get(key)
        if cipher is None:
            raise KeyMissing
        return cipher.decrypt(encoded[:_NONCE_BYTES], encoded[_NONCE_BYTES:], bound_to)


def read_keys(text: str) -> dict[str, bytes]:
    """Return the keys of ``NAME:KEY,…``; ValueError names the rule that they break, and no part of a key."""
    keys: dict[str, bytes] = {}
    for number, part in enumerate(text.split(","), start=1):
        name, _, key = part.strip().partition(":")
        if name in keys:
            raise ValueError(f"{_RULE}; entry {number} has the name of another one")
        try:
            keys[name] = base64.b64decode(key, validate=True)
            _check_keys({name: keys[name]})
        except (binascii.Error, ValueError):
            raise ValueError(f"{_RULE}; entry {number} does not") from None
    return keys


def _check_keys(keys: Mapping[str, bytes]) -> None:
    if not keys:
        raise ValueError("there must be a key")
    for number, (name, key) in enumerate(keys.items(), start=1):
        if not _KEY_NAME.fullmatch(name):
            raise ValueError(f"name of key {number} must match {_KEY_NAME.pattern}")
        if len(key) != _KEY_BYTES:
            raise ValueError(f"key {name} must have {_KEY_BYTES} bytes, not {len(key)}")
