"""The Compose file: it fits its schema, the settings and the servers it configures."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.files import ROOT, pod, read_yaml, settings_from
from tests.deployment.nats_servers import PINGS, get_json, greet, nats_server, pings, replaced
from tests.deployment.rendering import overlay

COMPOSE: dict[str, Any] = read_yaml((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, duration
    return float(match[1])


def test_compose_file_fits_the_compose_schema_which_refuses_a_misspelled_key(tmp_path: Path) -> None:
    ours, misspelled = ROOT / "docker-compose.yml", tmp_path / "docker-compose.yml"
    misspelled.write_text(ours.read_text().replace("stop_grace_period", "stop_grace_time"))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    options = ["--output-format", "json", str(ours), str(misspelled)]
    result = subprocess.run([*check, *options], capture_output=True, text=True, check=False)
    found = json.loads(result.stdout)
    assert found["parse_errors"] == []
    assert {error["filename"] for error in found["errors"]} == {str(misspelled)}, result.stdout
    assert "stop_grace_time" in result.stdout


@pytest.mark.parametrize("service", ["migration", "worker", "dashboard"])
def test_compose_settings_are_accepted(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_from(SERVICES[service]["environment"], tmp_path, monkeypatch)
    assert settings.database_dsn() == (
        "postgresql://jsworker:%2Frun%2Fcredentials%2Fdatabase-password@postgres:5432/jsworker"
    )
    assert settings.nats_url == "nats://nats:4222"
    assert settings.nats_password
    assert settings.nats_password.get_secret_value() == "/run/credentials/nats-password"


def test_compose_waits_longer_than_a_worker_takes_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = SERVICES["worker"]
    settings = settings_from(worker["environment"], tmp_path, monkeypatch)
    grace = seconds(worker["stop_grace_period"])
    assert grace == settings.grace_period
    assert grace > settings.shutdown_timeout + 2 * settings.statement_timeout


def test_compose_runs_two_workers_once_everything_they_need_is_there() -> None:
    worker = SERVICES["worker"]
    assert worker["deploy"]["replicas"] == 2
    assert {name: need["condition"] for name, need in worker["depends_on"].items()} == {
        "migration": "service_completed_successfully",
        "postgres": "service_healthy",
        "nats": "service_healthy",
    }
    assert SERVICES["migration"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    for service in SERVICES.values():
        for name, need in service.get("depends_on", {}).items():
            if need["condition"] == "service_healthy":
                assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", SERVICES)
def test_compose_services_are_as_restricted_as_the_pods(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ulimits"] == {"core": 0}
    user, _, group = service["user"].partition(":")
    assert user == group
    if name == "credentials":  # it runs once, with no network, before everybody else
        assert (user, service["network_mode"]) == ("0", "none")
        assert service["cap_add"] == ["CHOWN", "DAC_OVERRIDE"]
    else:
        assert int(user) > 0
        assert "cap_add" not in service


def test_compose_users_are_those_of_the_pods() -> None:
    single = overlay("single")
    pods = {
        "worker": single["StatefulSet", "jsworker"],
        "migration": single["Job", "jsworker-migration"],
        "postgres": single["StatefulSet", "postgres"],
        "nats": single["StatefulSet", "nats"],
    }
    for name, workload in pods.items():
        user = pod(workload)["securityContext"]["runAsUser"]
        assert SERVICES[name]["user"] == f"{user}:{user}"
    assert f"chown -R {SERVICES['nats']['user']} /data" in SERVICES["credentials"]["command"][0]


def test_compose_dashboard_is_closed_until_somebody_is_let_in() -> None:
    dashboard = SERVICES["dashboard"]
    assert dashboard["ports"] == ["127.0.0.1:8100:8100"]
    file = ROOT / "deploy/dashboard-logins.txt"
    assert f"./{file.relative_to(ROOT)}:/app/logins.txt:ro" in dashboard["volumes"]
    assert all(line.startswith("#") for line in file.read_text().splitlines())
    asked = dashboard["command"]
    assert asked[asked.index("--logins") + 1] == "/app/logins.txt"


def test_compose_commands_are_in_exec_form() -> None:
    commands = [
        service[key] for service in SERVICES.values() for key in ("entrypoint", "command") if key in service
    ]
    assert len(commands) == 6
    assert all(isinstance(command, list) for command in commands)


def test_compose_mounts_only_what_exists() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service["volumes"]]
    files = {source for source, *_ in mounts if source.startswith(".")}
    assert {source for source, *_ in mounts} - files == set(COMPOSE["volumes"])
    assert files
    assert all((ROOT / file).is_file() for file in files)
    worker = SERVICES["worker"]
    module, _, processor = worker["command"][1].partition(":")
    assert f"./deploy/{module}.py:/app/{module}.py:ro" in worker["volumes"]
    assert f"class {processor}(" in (ROOT / f"deploy/{module}.py").read_text()


def test_compose_postgres_is_the_database_that_workers_ask_for() -> None:
    postgres = SERVICES["postgres"]
    given = postgres["environment"]
    url = SERVICES["worker"]["environment"]["JSWORKER_DATABASE_URL"]
    assert url == f"postgresql://{given['POSTGRES_USER']}@postgres:5432/{given['POSTGRES_DB']}"
    assert (
        given["POSTGRES_PASSWORD_FILE"]
        == SERVICES["worker"]["environment"]["JSWORKER_DATABASE_PASSWORD_FILE"]
    )
    assert postgres["image"].partition(":")[2].startswith("18")


def draw_credentials(folder: Path) -> dict[str, str]:
    """Run the script of the credentials service on a folder; return what it wrote, by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    shell, option = SERVICES["credentials"]["entrypoint"]
    script = SERVICES["credentials"]["command"][0].replace("$$", "$")
    script = replaced(script, "/run/credentials", str(folder))
    data = folder.parent / "nats-data"
    data.mkdir(exist_ok=True)
    me = f"{os.getuid()}:{os.getgid()}"  # who runs the tests need not be root
    script = replaced(replaced(script, "1000:1000", me), "/data", str(data))
    subprocess.run([shell, option, script], check=True)
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_compose_credentials_are_drawn_once(tmp_path: Path) -> None:
    first = draw_credentials(tmp_path)
    assert draw_credentials(tmp_path) == first
    assert set(first) == {"database-password", "nats-password", "nats-users.conf"}
    assert re.fullmatch("[0-9a-f]{48}", first["database-password"])
    assert re.fullmatch("[0-9a-f]{48}", first["nats-password"])
    assert first["database-password"] != first["nats-password"]


@contextmanager
def compose_nats(folder: Path) -> Iterator[tuple[str, str]]:
    """Run a server on the Compose file's configuration; yield its URLs for clients and monitoring."""
    (mount,) = SERVICES["nats"]["configs"]
    config = folder / mount["target"].lstrip("/")
    config.parent.mkdir(parents=True)
    text = COMPOSE["configs"][mount["source"]]["content"]
    text = replaced(text, "port: 4222", "host: 127.0.0.1\nport: -1")
    text = replaced(text, "http: 127.0.0.1:8222", "http: 127.0.0.1:-1")
    text = replaced(text, "/data", json.dumps(str(folder / "data")))
    config.write_text(text)
    assert SERVICES["nats"]["command"] == ["--config", mount["target"]]
    with nats_server(config, folder) as urls:
        yield urls


def test_compose_nats_is_healthy_and_syncs_every_write(tmp_path: Path) -> None:
    draw_credentials(tmp_path / "run/credentials")
    *_, healthcheck = SERVICES["nats"]["healthcheck"]["test"]
    with compose_nats(tmp_path) as (_, monitoring):
        assert get_json(replaced(healthcheck, "http://127.0.0.1:8222", monitoring)) == {"status": "ok"}
        assert get_json(f"{monitoring}/varz")["jetstream"]["config"]["sync_always"] is True
        assert pings(monitoring) == PINGS


def test_compose_nats_lets_only_the_workers_in(tmp_path: Path) -> None:
    password = draw_credentials(tmp_path / "run/credentials")["nats-password"]
    user = SERVICES["worker"]["environment"]["JSWORKER_NATS_USER"]
    with compose_nats(tmp_path) as (url, _):
        assert greet(url) == "-ERR 'Authorization Violation'"
        assert greet(url, user=user, **{"pass": password}) == "PONG"
