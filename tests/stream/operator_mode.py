"""Operator mode: an operator, an account and a user, with JWTs made by hand."""

import base64
import json
import time
from dataclasses import dataclass
from typing import Any

import nkeys  # type: ignore[import-untyped] # has no stubs
from nacl.signing import SigningKey


@dataclass(frozen=True)
class Identity:
    """An nkey pair."""

    seed: bytes
    public: str

    def sign(self, subject: str, kind: str, claims: dict[str, Any]) -> str:
        """Return a JWT about ``subject``, signed by this identity."""
        header = {"typ": "JWT", "alg": "ed25519-nkey"}
        now = int(time.time())
        body = {
            "jti": f"{kind}-{subject}",
            "iat": now,
            "iss": self.public,
            "sub": subject,
            "name": kind,
            "nats": {"type": kind, "version": 2, **claims},
        }
        signed = f"{_base64(json.dumps(header).encode())}.{_base64(json.dumps(body).encode())}"
        signature = nkeys.from_seed(bytearray(self.seed)).sign(signed.encode())
        return f"{signed}.{_base64(signature)}"


def user_identity() -> Identity:
    return _identity(nkeys.PREFIX_BYTE_USER)


def _identity(prefix: int) -> Identity:
    seed = nkeys.encode_seed(SigningKey.generate().encode(), prefix)
    return Identity(bytes(seed), nkeys.from_seed(bytearray(seed)).public_key.decode())


def operator_mode() -> tuple[str, str]:
    """Return lines of a server's configuration and the text of a user's credentials file."""
    operator = _identity(nkeys.PREFIX_BYTE_OPERATOR)
    account = _identity(nkeys.PREFIX_BYTE_ACCOUNT)
    user = _identity(nkeys.PREFIX_BYTE_USER)
    system = _identity(nkeys.PREFIX_BYTE_ACCOUNT)
    unlimited = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1}
    jetstream = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    operator_jwt = operator.sign(operator.public, "operator", {"system_account": system.public})
    account_jwt = operator.sign(
        account.public, "account", {"limits": {**unlimited, "wildcards": True, **jetstream}}
    )
    system_jwt = operator.sign(system.public, "account", {"limits": {**unlimited, "wildcards": True}})
    user_jwt = account.sign(user.public, "user", {"subs": -1, "data": -1, "payload": -1})
    configuration = f"""
        operator: {operator_jwt}
        system_account: {system.public}
        resolver: MEMORY
        resolver_preload: {{ {account.public}: {account_jwt}, {system.public}: {system_jwt} }}
    """
    credentials = (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    return configuration, credentials


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
