"""Who logs in as whom: each has a Secret of its own, and its login may what it needs and no more."""

import base64
import hashlib
import hmac
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import errors

from jsworker.ownership.queries.server_report import read_missing_rights
from jsworker.ownership.upgrading import upgrade_database
from tests.deployment.files import (
    DEPLOY,
    KUBERNETES,
    ROOT,
    container,
    given_variables,
    pod,
    read_yaml,
    settings_from,
)
from tests.deployment.nats_servers import single_server
from tests.deployment.rendering import OVERLAYS, Manifest, Rendered, overlay, read_manifests, render
from tests.ownership.calls import opened
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually
from tests.support.servers import TestServers, as_role

RENDERED = {name: overlay(name) for name in OVERLAYS}
SINGLE = RENDERED["single"]
DASHBOARD = render(KUBERNETES / "dashboard")
(CLUSTER,) = read_manifests(DEPLOY / "postgres/cluster.yaml")
VALUES: dict[str, Any] = read_yaml((DEPLOY / "nats/helm-values.yaml").read_text())
GUIDE = (ROOT / "docs/kubernetes.md").read_text()
LOGINS = {
    "worker": "jsworker_worker",
    "migration": "jsworker_owner",
    "producer": "jsworker_producer",
    "reader": "jsworker_reader",
    "metrics": "jsworker_metrics",
    "operator": "jsworker_operator",
}
"""The role of each login in PostgreSQL."""
NATS_USERS = {"worker": "worker", "migration": "operator", "producer": "producer"}
SECRET_FILES = "/run/secrets/jsworker"


def references(document: Any) -> Iterator[tuple[str, str]]:
    """Yield name and key of every Secret that a document reads; the key is empty where all are read."""
    if isinstance(document, list):
        for one in document:
            yield from references(one)
    if isinstance(document, dict):
        for key, value in document.items():
            if key in ("secret", "secretKeyRef", "passwordSecret", "secretTargetRef"):
                for given in value if isinstance(value, list) else [value]:
                    name = given.get("secretName") or given["name"]
                    items = given.get("items") or [given]
                    yield from ((name, item.get("key", "")) for item in items)
            else:
                yield from references(value)


def made_by_the_guide() -> dict[str, set[str]]:
    """The Secrets that the guide makes, with their keys."""
    loops = re.findall(r"(?ms)^for name in ([a-z ]+); do\n(.*?)^done$", GUIDE)
    assert len(loops) == 2
    assert loops[0] == loops[1]
    names, body = loops[0]
    assert 'create secret generic "jsworker-$name" --type=kubernetes.io/basic-auth' in body
    assert '--from-literal="username=jobs_$name"' in body
    keys = set(re.findall(r"--from-file=(\S+)", body)) | {"username"}
    one = re.findall(r"create secret generic (nats-system) --from-file=(\S+)\n", GUIDE)
    return {f"jsworker-{name}": keys for name in names.split()} | {name: {key} for name, key in one}


def test_every_secret_is_made_by_the_guide_with_the_keys_that_are_read() -> None:
    made = made_by_the_guide()
    assert made.keys() == {f"jsworker-{login}" for login in LOGINS} | {"nats-system"}
    by_the_operator = {("jsworker-postgres-ca", "ca.crt")}
    dashboards_own = {("jsworker-dashboard", "")}  # docs/operate/dashboard.md
    everything = [
        *SINGLE.values(),
        *RENDERED["scale-out"].values(),
        *DASHBOARD.values(),
        CLUSTER,
        VALUES,
    ]
    read = set(references(everything)) - by_the_operator - dashboards_own
    assert {name for name, _ in read} == made.keys()
    assert [(name, key) for name, key in read if key and key not in made[name]] == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_workers_do_not_have_the_secret_of_the_migration(name: str) -> None:
    workers, migration = (
        {secret for secret, _ in references(RENDERED[name][key])} - {"jsworker-postgres-ca"}
        for key in (("StatefulSet", "jsworker"), ("Job", "jsworker-migration"))
    )
    assert workers == {"jsworker-worker"}
    assert migration == {"jsworker-migration"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_dashboard_logs_in_as_an_operator_and_has_nobody_elses_password(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = DASHBOARD["Deployment", "jsworker-dashboard"]
    variables = given_variables(RENDERED[name], deployment)
    assert variables["JSWORKER_DATABASE_URL"].startswith("postgresql://jobs_operator@")
    assert variables["JSWORKER_NATS_USER"] == "jsworker-operator"
    assert variables["JSWORKER_NATS_INBOX_PREFIX"] == "_INBOX_OPERATOR"
    workers = given_variables(RENDERED[name], RENDERED[name]["StatefulSet", "jsworker"])
    place = workers["JSWORKER_DATABASE_URL"].partition("@")[2]
    assert variables["JSWORKER_DATABASE_URL"].partition("@")[2] == place
    settings_from(variables, tmp_path, monkeypatch)
    mounted = {
        item["path"]: (given["name"], item["key"]) for given, item in projected(deployment, SECRET_FILES)
    }
    assert mounted == {
        "password": ("jsworker-operator", "password"),
        "nats-password": ("jsworker-migration", "nats-password"),
    }


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.parametrize(
    ("login", "key"), [("worker", ("StatefulSet", "jsworker")), ("migration", ("Job", "jsworker-migration"))]
)
def test_each_logs_in_as_the_one_whose_secret_it_has(name: str, login: str, key: tuple[str, str]) -> None:
    variables = given_variables(RENDERED[name], RENDERED[name][key])
    assert variables["JSWORKER_DATABASE_URL"].startswith(f"postgresql://jobs_{login}@")
    user = NATS_USERS[login]
    assert variables["JSWORKER_NATS_USER"] == f"jsworker-{user}"
    assert variables["JSWORKER_NATS_INBOX_PREFIX"] == f"_INBOX_{user.upper()}"


def test_cluster_gives_each_login_the_password_of_its_secret() -> None:
    initdb = CLUSTER["spec"]["bootstrap"]["initdb"]
    assert (initdb["owner"], initdb["secret"]["name"]) == ("jobs_migration", "jsworker-migration")
    roles = {role["name"]: role for role in CLUSTER["spec"]["managed"]["roles"]}
    assert {name: role["passwordSecret"]["name"] for name, role in roles.items()} == {
        f"jobs_{login}": f"jsworker-{login}" for login in LOGINS if login != "migration"
    }
    assert all(role["login"] is True for role in roles.values())


def test_new_databases_run_the_files_that_are_there() -> None:
    at_first = CLUSTER["spec"]["bootstrap"]["initdb"]["postInitApplicationSQLRefs"]["configMapRefs"]
    shipped = render(DEPLOY / "postgres")["ConfigMap", "postgres-roles"]["data"]
    assert [one["name"] for one in at_first] == ["postgres-roles"] * 3
    assert [shipped[one["key"]] for one in at_first] == [
        (DEPLOY / "postgres" / file).read_text() for file in ("roles.sql", "logins.sql", "own-database.sql")
    ]
    names = ["1-roles.sql", "2-logins.sql", "3-own-database.sql", "4-passwords.sql"]
    assert [name for name, _ in first_start()] == names
    assert [text for _, text in first_start()[:3]] == [shipped[one["key"]] for one in at_first]


# On real servers


def projected(workload: Manifest, path: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The sources of the volume that is mounted at a path, each with its items."""
    (name,) = (mount["name"] for mount in container(workload)["volumeMounts"] if mount["mountPath"] == path)
    (volume,) = (volume for volume in pod(workload)["volumes"] if volume["name"] == name)
    for source in volume["projected"]["sources"]:
        for given in source.values():
            for item in given["items"]:
                yield given, item


def first_start() -> list[tuple[str, str]]:
    """The files that the server of the overlay single runs at its first start, in this order."""
    found = {
        item["path"]: SINGLE["ConfigMap", given["name"]]["data"][item["key"]]
        for given, item in projected(SINGLE["StatefulSet", "postgres"], "/docker-entrypoint-initdb.d")
    }
    return sorted(found.items())


class Installation:
    """A database of the overlay single, and what its Secrets hold."""

    def __init__(self, servers: TestServers, folder: Path) -> None:
        self._psql = str(servers.postgres.program("psql"))
        self._folder = folder
        self.url = servers.postgres.create_database(f"logins_{secrets.token_hex(4)}")
        self.passwords = {
            login: {key: f"{key} of {login} {secrets.token_hex(8)}" for key in ("password", "nats-password")}
            for login in LOGINS
        }

    def as_login(self, login: str) -> str:
        return as_role(self.url, f"jobs_{login}")

    def start(self) -> None:
        """Run what the server runs at its first start."""
        mounted = self._folder / "secrets"
        mounted.mkdir()
        for given, item in projected(SINGLE["StatefulSet", "postgres"], SECRET_FILES):
            login = given["name"].removeprefix("jsworker-")
            (mounted / item["path"]).write_text(self.passwords[login][item["key"]])
        for name, text in first_start():
            file = self._folder / name
            file.write_text(text.replace(SECRET_FILES, str(mounted)))
            command = [
                self._psql,
                "-v",
                "ON_ERROR_STOP=1",
                "--no-psqlrc",
                "-q",
                "-d",
                self.url,
                "-f",
                str(file),
            ]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def execute(self, *files: str) -> None:
        """Run shipped files as the operator and the guide do, as a superuser."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            for file in files:
                connection.execute((DEPLOY / "postgres" / file).read_bytes())


@pytest.fixture
def installation(servers: TestServers, tmp_path: Path) -> Installation:
    return Installation(servers, tmp_path)


def is_password(verifier: str, password: str) -> bool:
    """Tell whether PostgreSQL's SCRAM verifier is that of a password."""
    _, iterations, salt, stored, _ = re.split(r"[$:]", verifier)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), base64.b64decode(salt), int(iterations))
    key = hmac.digest(salted, b"Client Key", "sha256")
    return base64.b64encode(hashlib.sha256(key).digest()).decode() == stored


def test_first_start_gives_each_login_its_password_and_the_superuser_none(installation: Installation) -> None:
    with psycopg.connect(installation.url) as connection:  # as the image does
        connection.execute("ALTER ROLE postgres PASSWORD 'c2f7b8f0-6c0e-4d9e-9d4e-0a4a0f4ff3f1'")
    installation.start()
    with psycopg.connect(installation.url) as connection:
        verifiers: dict[str, Any] = dict(
            connection.execute("SELECT rolname, rolpassword FROM pg_authid").fetchall()
        )
    assert verifiers["postgres"] is None
    for login, given in installation.passwords.items():
        assert is_password(verifiers[f"jobs_{login}"], given["password"])
        assert not is_password(verifiers[f"jobs_{login}"], given["nats-password"])


def test_logins_are_what_the_operator_is_told_that_they_are(installation: Installation) -> None:
    installation.execute("roles.sql", "logins.sql", "logins.sql")
    with psycopg.connect(installation.url) as connection:
        rows = connection.execute(
            "SELECT m.rolname, m.rolcanlogin, m.rolsuper OR m.rolcreaterole OR m.rolcreatedb, m.rolconnlimit,"
            " array_agg(g.rolname::text ORDER BY g.rolname) FROM pg_auth_members AS a"
            " JOIN pg_roles AS m ON m.oid = a.member JOIN pg_roles AS g ON g.oid = a.roleid"
            " WHERE m.rolname LIKE 'jobs\\_%' GROUP BY 1, 2, 3, 4"
        ).fetchall()
    limits = {role["name"]: role["connectionLimit"] for role in CLUSTER["spec"]["managed"]["roles"]}
    members = {role["name"]: role["inRoles"] for role in CLUSTER["spec"]["managed"]["roles"]}
    assert {name: limit for name, *_, limit, _ in rows} == {"jobs_migration": 5, **limits}
    assert {name: groups for name, *_, groups in rows} == {"jobs_migration": ["jsworker_owner"], **members}
    assert {tuple(rights) for _, *rights, _, _ in rows} == {(True, False)}
    of_one = {name: [role] for name, role in LOGINS.items()}
    with_reader = {login: sorted(["jsworker_reader", LOGINS[login]]) for login in ("worker", "operator")}
    assert {**of_one, **with_reader} == {name.removeprefix("jobs_"): groups for name, *_, groups in rows}


async def test_migration_owns_the_tables_and_workers_need_nothing_more(installation: Installation) -> None:
    installation.execute("roles.sql", "logins.sql")
    with psycopg.connect(installation.url) as connection:  # as the operator makes it
        connection.execute(f"ALTER DATABASE {connection.info.dbname} OWNER TO jobs_migration".encode())
    upgrade_database(installation.as_login("migration"))
    with psycopg.connect(installation.url) as connection:
        owners = connection.execute(
            "SELECT DISTINCT relowner::regrole::text FROM pg_class"
            " WHERE relnamespace = 'jsworker'::regnamespace"
        ).fetchall()
    assert owners == [("jsworker_owner",)]
    async with opened(installation.as_login("worker")) as database:
        assert await read_missing_rights(database) == []
    installation.execute("roles.sql")
    async with opened(installation.as_login("worker")) as database:
        assert await read_missing_rights(database) == []
    async with opened(installation.as_login("operator")) as database:
        # As the dashboard of the manifests does.
        reads = database.for_reading(seconds=30.0, role="jsworker_reader")
        [row] = await reads.run(
            sa.text("SELECT CAST(CURRENT_USER AS text) AS role, count(*) FROM jsworker.jobs")
        )
        assert row.role == "jsworker_reader"
    forbidden = {
        "worker": "UPDATE jsworker.alembic_version SET version_num = ''",
        "producer": "SELECT payload FROM jsworker.jobs",
        "reader": "DELETE FROM jsworker.jobs",
        "metrics": "SELECT payload FROM jsworker.jobs",
        "operator": "DELETE FROM jsworker.audit",
    }
    for login, statement in forbidden.items():
        with (
            psycopg.connect(installation.as_login(login)) as connection,
            pytest.raises((errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction)),
        ):
            connection.execute(statement.encode())


@pytest.fixture
def nats(installation: Installation, tmp_path: Path) -> Iterator[str]:
    """The server of the overlay single."""
    folder = tmp_path / "nats"
    folder.mkdir()
    passwords = {
        f"{user.upper()}_PASSWORD": installation.passwords[login]["nats-password"]
        for login, user in NATS_USERS.items()
    }
    with single_server(folder, passwords) as (url, _):
        yield url


def environment(
    rendered: Rendered, key: tuple[str, str], installation: Installation, nats_url: str, folder: Path
) -> dict[str, str]:
    """What a container is given, on the servers of the test."""
    login = "worker" if key[0] == "StatefulSet" else "migration"
    files = folder / login
    files.mkdir()
    for name, text in installation.passwords[login].items():
        (files / name).write_text(text)
    given = given_variables(rendered, rendered[key])
    database, _, _ = given["JSWORKER_DATABASE_URL"].partition("@")
    _, _, place = installation.url.partition("@")
    return {
        **{name: value.replace(SECRET_FILES, str(files)) for name, value in given.items()},
        "JSWORKER_DATABASE_URL": f"{database}@{place}",
        "JSWORKER_NATS_URL": nats_url,
        "JSWORKER_HTTP_PORT": "0",
    }


async def test_migration_prepares_what_workers_then_work_with(
    installation: Installation, nats: str, tmp_path: Path
) -> None:
    installation.start()
    migration, workers = ("Job", "jsworker-migration"), ("StatefulSet", "jsworker")
    as_migration = environment(SINGLE, migration, installation, nats, tmp_path)
    as_worker = environment(SINGLE, workers, installation, nats, tmp_path)
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(variables: dict[str, str], *command: str) -> "subprocess.CompletedProcess[str]":
        given = {**programs, **variables}
        return subprocess.run(command, cwd=DEPLOY, env=given, capture_output=True, text=True, check=False)

    one = container(SINGLE[migration])
    (shell, option), (script,) = one["command"], one["args"]
    done = run(as_migration, shell, option, script)
    assert done.returncode == 0, done.stderr
    assert "stream JOBS is ready for count-words" in done.stdout
    again = run(as_worker, shell, option, script)
    assert again.returncode == 1
    assert "permission denied" in again.stderr
    installation.execute("roles.sql")

    _, target = container(SINGLE[workers])["args"]
    (tmp_path / "example_jobs.py").write_text((DEPLOY / "example_jobs.py").read_text())
    parent = ParentProcess(target, folder=tmp_path, environment=as_worker)
    try:
        enqueue = ("jsworker", "enqueue", "count-words", "--payload", '{"text": "to be or not to be"}')
        enqueued = run(as_worker, *enqueue)
        assert enqueued.returncode == 0, enqueued.stderr

        async def completed() -> None:
            with psycopg.connect(installation.as_login("reader")) as connection:
                rows = connection.execute("SELECT status, result FROM jsworker.jobs").fetchall()
            assert rows == [("completed", {"to": 2, "be": 2, "or": 1, "not": 1})], parent.log

        await eventually(completed, seconds=60)
        assert parent.lines("worker.degraded") == []
    finally:
        parent.kill_all()
