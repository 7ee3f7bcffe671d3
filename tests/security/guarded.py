"""The shipped roles and users, ``roles.sql`` and ``permissions.conf`` below deploy/, on servers of a test."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from jsworker.ownership.upgrading import upgrade_database
from tests.support.servers import as_role

ROOT = Path(__file__).parents[2]
ROLES = ROOT / "deploy" / "postgres" / "roles.sql"
PERMISSIONS = ROOT / "deploy" / "nats" / "permissions.conf"

LOGINS = {
    "owner": "guarded_deploy",
    "worker": "guarded_worker",
    "producer": "guarded_producer",
    "publisher": "guarded_publisher",
    "reader": "guarded_reader",
    "metrics": "guarded_metrics",
    "debouncer": "guarded_debouncer",
    "operator": "guarded_operator",
}
"""The login that is a member of each group role; who publishes or debounces also enqueues."""

PASSWORDS = {
    "JSWORKER_NATS_WORKER_PASSWORD": "w0rker",
    "JSWORKER_NATS_PRODUCER_PASSWORD": "12e4",  # unquoted it would be a number
    "JSWORKER_NATS_OPERATOR_PASSWORD": "operat0r",
}

HARNESS = {"nats_user": "harness", "nats_password": "harness"}
"""A user of the same account that may do everything: for looking on, not shipped."""


@dataclass(frozen=True)
class Guarded:
    """A database behind the shipped roles."""

    admin_url: str

    def url(self, role: str) -> str:
        """Where the login of a role connects."""
        return as_role(self.admin_url, LOGINS[role])


def apply_roles(url: str) -> None:
    """Run the shipped file as whoever the URL names."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(ROLES.read_bytes())


def make_logins(admin_url: str, logins: Mapping[str, str] = LOGINS) -> None:
    """Make logins that are members of the group roles, as the file's first lines advise."""
    with psycopg.connect(admin_url, autocommit=True) as connection:
        for role, login in logins.items():
            known = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [login]).fetchone()
            if known is None:
                connection.execute(f"CREATE ROLE {login} LOGIN".encode())
            connection.execute(f"GRANT jsworker_{role} TO {login}".encode())
            if role in ("publisher", "debouncer"):
                connection.execute(f"GRANT jsworker_producer TO {login}".encode())
        if "owner" in logins:
            connection.execute(f"ALTER ROLE {logins['owner']} SET role = 'jsworker_owner'".encode())


def guard(admin_url: str) -> Guarded:
    """Migrate an empty database as its owner's login, and give every role its rights."""
    guarded = Guarded(admin_url)
    apply_roles(admin_url)
    make_logins(admin_url)
    upgrade_database(guarded.url("owner"))
    apply_roles(admin_url)
    return guarded


def nats_user(role: str) -> dict[str, Any]:
    """Return the settings by which a role logs in to NATS."""
    return {
        "nats_user": f"jsworker-{role}",
        "nats_password": PASSWORDS[f"JSWORKER_NATS_{role.upper()}_PASSWORD"],
        "nats_inbox_prefix": f"_INBOX_{role.upper()}",
    }


def nats_permissions(*, stream: str = "JOBS", prefix: str = "jobs") -> str:
    """Return the shipped file with the harness's user, for a stream of another name."""
    text = re.sub(r"(?<=\.)JOBS\b", stream, PERMISSIONS.read_text()).replace('"jobs.*', f'"{prefix}.*')
    return text.replace("users: [", "users: [\n      { user: harness, password: harness }", 1)


def with_passwords(text: str) -> str:
    """Put the passwords where the server would find them in its environment."""
    for variable, password in PASSWORDS.items():
        text = text.replace(f"${variable}", f'"{password}"')
    return text
