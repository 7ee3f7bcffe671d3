"""Runbook and guide: their commands and their SQL are real, their links lead somewhere."""

import re
import shlex
from typing import Any, cast

import psycopg
import pytest

from jsworker.cli.app import _COMMANDS
from tests.cli.commands import Cli
from tests.deployment.files import DEPLOY, ROOT, container
from tests.deployment.rendering import overlay

DOCS = ROOT / "docs"
DOCUMENTS = {
    str(page.relative_to(DOCS)): page.read_text()
    for page in (DOCS / "kubernetes.md", DOCS / "runbook.md", *sorted(DOCS.glob("runbook/*.md")))
}


REPAIRS = [
    """UPDATE jsworker.unique_windows AS w SET until = w.until - (j.created_at - now())
FROM jsworker.jobs AS j WHERE j.id = w.job_id AND j.created_at > now()"""
]
"""The statements that change rows."""


def blocks(language: str) -> list[tuple[str, str]]:
    """The code blocks of a language, each with the name of its document."""
    return [
        (name, block)
        for name, text in DOCUMENTS.items()
        for block in re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)
    ]


def typed_commands() -> list[list[str]]:
    lines = [line for _, block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    found = [re.search(r"(?:^| -- )jsworker (.*)$", line) for line in lines]
    return [shlex.split(command[1], comments=True) for command in found if command]


def statements() -> list[str]:
    """Return the queries; what repairs has a test of its own."""
    parts = [part.strip() for _, block in blocks("sql") for part in block.split(";")]
    return [part for part in parts if part and part not in REPAIRS]


@pytest.mark.parametrize("command", sorted({words[0] for words in typed_commands()}))
def test_commands_and_their_options_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command in _COMMANDS
    typed = [words for words in typed_commands() if words[0] == command]
    for words in typed:
        subcommand = words[1:2] if command in ("db", "limits", "schedules", "stream") else []
        shown = Cli(capsys)(command, *subcommand, "--help").ok().out
        options = {word for word in words if word.startswith("--")}
        assert options <= set(re.findall(r"--[a-z-]+", shown))


@pytest.mark.parametrize("statement", statements())
def test_statement_is_answered_by_a_migrated_database(statement: str, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute("SET TRANSACTION READ ONLY")
        connection.execute(cast("Any", statement))


def test_windows_that_a_clock_ahead_has_made_too_long_end_in_time(database_url: str) -> None:
    [repair] = REPAIRS
    assert any(repair in block for _, block in blocks("sql"))
    with psycopg.connect(database_url) as connection:
        for kind, ahead in (("ahead", "1 day"), ("right", "-1 minute")):
            connection.execute(
                "WITH job AS (INSERT INTO jsworker.jobs (id, kind, payload, status, run_at, created_at)"
                " VALUES (gen_random_uuid(), %(kind)s, '{}', 'scheduled', now(), now() + %(ahead)s::interval)"
                " RETURNING id, created_at)"
                " INSERT INTO jsworker.unique_windows"
                " SELECT %(kind)s, 'key', id, created_at + interval '1 h' FROM job",
                {"kind": kind, "ahead": ahead},
            )
        connection.execute(cast("Any", repair))
        left = (
            "SELECT kind, extract(epoch FROM until - now())::int FROM jsworker.unique_windows ORDER BY kind"
        )
        assert connection.execute(left).fetchall() == [("ahead", 3600), ("right", 3540)]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", text))
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_people_enter_the_database_as_who_is_there() -> None:
    """The server of the overlay single has the superuser of its image."""
    for text in DOCUMENTS.values():
        assert set(re.findall(r"--username[ =](\S+?)[`\s)]", text)) <= {"postgres"}
    environment = [entry["name"] for entry in container(overlay("single")["StatefulSet", "postgres"])["env"]]
    assert "POSTGRES_USER" not in environment


def test_secrets_that_are_named_are_made() -> None:
    made = {"nats-system", "jsworker-postgres-ca"}
    for loop in re.findall(r"(?m)^for name in ([a-z ]+); do", DOCUMENTS["kubernetes.md"]):
        made |= {f"jsworker-{name}" for name in loop.split()}
    for text in DOCUMENTS.values():
        assert set(re.findall(r"Secret `([^`]+)`", text)) <= made


def test_a_changed_password_needs_no_restart_of_workers_but_one_of_nats() -> None:
    """Files are read again with each connection; nats-server reads its environment at its start."""
    assert "rollout restart" not in DOCUMENTS["runbook/servers.md"]
    _, _, rotation = (DOCS / "operating.md").read_text().partition("## Rotate a password\n")
    rotation, _, _ = rotation.partition("\n## ")
    files, _, variables = rotation.partition("Only passwords in variables")
    assert re.findall(r"rollout restart (\S+)`", files) == ["statefulset/nats"]
    assert re.findall(r"rollout restart (\S+)`", variables) == ["statefulset/jsworker"]


def test_a_stream_that_was_deleted_is_made_by_the_migration_and_not_by_workers() -> None:
    users = (DEPLOY / "nats/permissions.conf").read_text()
    workers, _, others = users.partition("MAY_PRODUCE")
    assert "STREAM.CREATE" not in workers
    assert "STREAM.CREATE" in others
    runbook = " ".join(" ".join(text for name, text in DOCUMENTS.items() if "runbook" in name).split())
    assert not re.search(r"workers make|doctor --fix` (makes|takes)", runbook)
    assert len(re.findall(r"migration's Job", runbook)) >= 4


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = DOCUMENTS[name]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    for link in links:
        file, _, anchor = link.partition("#")
        target = (DOCS / name).parent / file if file else DOCS / name
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_guide_tells_what_each_file_is_for() -> None:
    _, _, files = DOCUMENTS["kubernetes.md"].partition("\n## The files\n")
    named = set(re.findall(r"(?m)^\| `([^`]+)` \|", files.partition("\n## ")[0]))
    kept = {"example_jobs.py", "requirements.lock", "build.in", "build.lock"}
    kept |= {f"{folder}/kustomization.yaml" for folder in ("kubernetes/base", "nats", "postgres")}
    there = {
        str(file.relative_to(ROOT / "deploy"))
        for file in (ROOT / "deploy").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    described = {
        file
        for file in there
        if file in named or any(name.endswith("/") and file.startswith(name) for name in named)
    }
    assert there - described == kept
    assert all((ROOT / "deploy" / name).exists() for name in named)


def test_guide_names_files_that_exist() -> None:
    text = DOCUMENTS["kubernetes.md"]
    paths = re.findall(r"(?:--filename|--kustomize|--values|--file|<) (deploy/\S+)", text)
    assert "deploy/postgres/roles.sql" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
