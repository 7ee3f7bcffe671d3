"""The deployment files: they fit their schemas, each other, the settings and the servers they configure."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from jsworker.embedded.wheels import find_nats_server
from jsworker.settings import Settings, load_settings, unknown_variables

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MANIFESTS: dict[tuple[str, str], dict[str, Any]] = {
    (document["kind"], document["metadata"]["name"]): document
    for file in sorted((ROOT / "deploy").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
}
STATEFULSET = MANIFESTS["StatefulSet", "jsworker"]
MIGRATION = MANIFESTS["Job", "jsworker-migration"]
CONFIG: dict[str, str] = MANIFESTS["ConfigMap", "jsworker"]["data"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def pod(workload: Mapping[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def settings_from(variables: Mapping[str, str], files: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings as a container with these variables reads them; a secret's file holds its path there."""
    for variable in [name for name in os.environ if name.startswith("JSWORKER_")]:
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        assert isinstance(value, str), f"{variable} needs quotes"
        if variable.endswith("_FILE"):
            file = files / Path(value).name
            file.write_text(value)
            monkeypatch.setenv(variable, str(file))
        else:
            monkeypatch.setenv(variable, value)
    assert unknown_variables() == []
    return load_settings()


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, duration
    return float(match[1])


# Compose


def check_compose(file: Path) -> "subprocess.CompletedProcess[str]":
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(check, capture_output=True, text=True, check=False)


def test_compose_file_fits_the_compose_schema() -> None:
    result = check_compose(ROOT / "docker-compose.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_schema_refuses_a_misspelled_key(tmp_path: Path) -> None:
    file = tmp_path / "docker-compose.yml"
    file.write_text((ROOT / "docker-compose.yml").read_text().replace("stop_grace_period", "stop_grace_time"))
    assert "stop_grace_time" in check_compose(file).stdout


@pytest.mark.parametrize("service", ["migration", "worker"])
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


def test_compose_commands_are_in_exec_form() -> None:
    commands = [
        service[key] for service in SERVICES.values() for key in ("entrypoint", "command") if key in service
    ]
    assert len(commands) == 5
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
    subprocess.run([shell, option, script], check=True)
    return {file.name: file.read_text() for file in folder.iterdir()}


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old} once in:\n{text}"
    return text.replace(old, new)


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
    option, path = SERVICES["nats"]["command"]
    assert path == mount["target"]
    command = [find_nats_server(), option, config, "--ports_file_dir", folder]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            ports = read_when_there(folder / f"nats-server_{server.pid}.ports")
            yield ports["nats"][0], ports["monitoring"][0]
        finally:
            server.terminate()


def read_when_there(file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 10
    while True:
        try:
            content: dict[str, Any] = json.loads(file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not yet, or half of it
            assert time.monotonic() < deadline, f"{file} is not there after 10 s"
            time.sleep(0.02)
        else:
            return content


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 -- the address of a server of this test
        return json.load(answer)


def test_compose_nats_is_healthy_and_syncs_every_write(tmp_path: Path) -> None:
    draw_credentials(tmp_path / "run/credentials")
    *_, healthcheck = SERVICES["nats"]["healthcheck"]["test"]
    with compose_nats(tmp_path) as (_, monitoring):
        assert get_json(replaced(healthcheck, "http://127.0.0.1:8222", monitoring)) == {"status": "ok"}
        assert get_json(f"{monitoring}/varz")["jetstream"]["config"]["sync_always"] is True


def greet(url: str, **login: str) -> str:
    """Return the answer of a NATS server to a login."""
    address = urlsplit(url)
    with (
        socket.create_connection((address.hostname, address.port), timeout=10) as connection,
        connection.makefile("rw", encoding="ascii", newline="\r\n") as stream,
    ):
        assert stream.readline().startswith("INFO ")
        stream.write(f"CONNECT {json.dumps({'verbose': False} | login)}\r\nPING\r\n")
        stream.flush()
        return stream.readline().strip()


def test_compose_nats_lets_only_the_workers_in(tmp_path: Path) -> None:
    password = draw_credentials(tmp_path / "run/credentials")["nats-password"]
    user = SERVICES["worker"]["environment"]["JSWORKER_NATS_USER"]
    with compose_nats(tmp_path) as (url, _):
        assert greet(url) == "-ERR 'Authorization Violation'"
        assert greet(url, user=user, **{"pass": password}) == "PONG"


# The image


def stages() -> list[list[list[str]]]:
    """The instructions of each stage, as words."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    found: list[list[list[str]]] = []
    for words in filter(None, map(str.split, lines)):
        if words[0] == "FROM":
            found.append([])
        found[-1].append(words)
    return found


def test_image_runs_jsworker_without_privileges_in_exec_form() -> None:
    *_, final = stages()
    assert final[0] == ["FROM", "python:3.13-slim"]
    last = {instruction: " ".join(words) for instruction, *words in final}
    assert last["USER"] == "10001:10001"
    assert json.loads(last["ENTRYPOINT"]) == ["jsworker"]
    assert json.loads(last["CMD"]) == ["--help"]
    assert "HEALTHCHECK" not in last


def test_image_holds_wheels_built_before_and_no_build_tools() -> None:
    build, final = stages()
    assert build[0] == ["FROM", "python:3.13-slim", "AS", "build"]
    assert not [words for words in final if words[0] in ("COPY", "ADD")]
    (run,) = [" ".join(words) for words in final if words[0] == "RUN"]
    assert "--mount=type=bind,from=build,source=/wheels,target=/wheels" in run
    assert "pip install --no-cache-dir --no-index --no-deps" in run
    assert not re.search("apt|gcc|hatchling", DOCKERFILE)


def test_image_is_built_from_files_that_exist_and_reach_the_builder() -> None:
    build, _ = stages()
    sources = {source for instruction, *words in build if instruction == "COPY" for source in words[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


# Kubernetes


@pytest.mark.parametrize("workload", [STATEFULSET, MIGRATION], ids=["workers", "migration"])
def test_pods_are_restricted(workload: Mapping[str, Any]) -> None:
    spec = pod(workload)
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert isinstance(container["args"], list)
    assert "command" not in container


@pytest.mark.parametrize("workload", [STATEFULSET, MIGRATION], ids=["workers", "migration"])
def test_pods_mount_what_their_settings_name(workload: Mapping[str, Any]) -> None:
    spec = pod(workload)
    (container,) = spec["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "jsworker"}}]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert "emptyDir" in volumes[mounts["/tmp"]]  # noqa: S108 -- the container's
    secret = volumes[mounts["/run/secrets/jsworker"]]["secret"]
    assert secret == {"secretName": "jsworker", "defaultMode": 0o440}
    files = {value for variable, value in CONFIG.items() if variable.endswith("_FILE")}
    assert files == {"/run/secrets/jsworker/database-password", "/run/secrets/jsworker/nats-password"}
    how_to = (ROOT / "deploy/config.yaml").read_text()
    assert (
        "kubectl create secret generic jsworker --from-file=database-password --from-file=nats-password"
        in how_to
    )


def test_statefulset_settings_are_accepted_and_fit_its_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = pod(STATEFULSET)["containers"]
    downward = {"metadata.name": "jsworker-0", "metadata.uid": "c2f7b8f0-6c0e-4d9e-9d4e-0a4a0f4ff3f1"}
    own = {
        entry["name"]: entry.get("value") or downward[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }
    settings = settings_from({**CONFIG, **own}, tmp_path, monkeypatch)
    assert settings.hostname == "jsworker-0"
    assert settings.pod_uid == downward["metadata.uid"]
    assert settings.container == container["name"]
    grace = pod(STATEFULSET)["terminationGracePeriodSeconds"]
    assert grace == settings.grace_period
    assert grace > settings.shutdown_timeout + 2 * settings.statement_timeout


def test_statefulset_names_the_headless_service_that_finds_its_pods() -> None:
    spec = STATEFULSET["spec"]
    service = MANIFESTS["Service", spec["serviceName"]]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == labels == spec["selector"]["matchLabels"]
    assert MIGRATION["spec"]["template"]["metadata"]["labels"] != labels
    assert spec["podManagementPolicy"] == "Parallel"


def test_migration_is_a_job_of_the_workers_image() -> None:
    (migration,) = pod(MIGRATION)["containers"]
    (worker,) = pod(STATEFULSET)["containers"]
    assert migration["args"] == ["db", "upgrade"]
    assert migration["image"] == worker["image"]
    assert pod(MIGRATION)["restartPolicy"] == "Never"
