"""NATS in the cluster: the configurations are taken by real servers, and do what they are for."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jsworker.core.priorities import HIGH, LOW, NORMAL
from jsworker.stream.message import consumer_of
from tests.deployment.files import DEPLOY, container, own_variables, pod, read_yaml
from tests.deployment.nats_servers import PINGS, expanded, get_json, greet, nats_server, pings, single_server
from tests.deployment.rendering import overlay

VALUES: dict[str, Any] = read_yaml((DEPLOY / "nats/helm-values.yaml").read_text())
SINGLE = overlay("single")
SCALE_OUT = overlay("scale-out")
PERMISSIONS = (DEPLOY / "nats/permissions.conf").read_text()
PASSWORDS = {
    "WORKER_PASSWORD": "120000",  # which a server takes for numbers where they are not quoted
    "PRODUCER_PASSWORD": "12e4",
    "OPERATOR_PASSWORD": "0",
    "SYSTEM_PASSWORD": "1k",
}
SECRETS = {
    "WORKER_PASSWORD": {"name": "jsworker-worker", "key": "nats-password"},
    "PRODUCER_PASSWORD": {"name": "jsworker-producer", "key": "nats-password"},
    "OPERATOR_PASSWORD": {"name": "jsworker-migration", "key": "nats-password"},
    "SYSTEM_PASSWORD": {"name": "nats-system", "key": "password"},
}
USERS = {role: f"jsworker-{role}" for role in ("worker", "producer", "operator")}


def chart_config(folder: Path) -> str:
    """The configuration that the chart makes of the values, for one server without routes."""
    config = VALUES["config"]
    jetstream = {"store_dir": str(folder / "data"), "max_memory_store": 0, **config["jetstream"]["merge"]}
    made = {
        "host": "127.0.0.1",
        "port": -1,
        "http": "127.0.0.1:-1",
        "jetstream": jetstream,
        **config["merge"],
    }
    return re.sub(r'"<< (\S+) >>"', r"\1", json.dumps(made, indent=2))


@contextmanager
def chart_server(folder: Path, passwords: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run a server on the configuration that the chart makes."""
    config = folder / "nats.conf"
    config.write_text(chart_config(folder))
    given = VALUES["container"]["env"]
    by_name = {name: given[name] if isinstance(given[name], str) else None for name in sorted(given)}
    with nats_server(config, folder, expanded(by_name, passwords)) as urls:
        yield urls


servers = pytest.mark.parametrize("server", [single_server, chart_server], ids=["single", "chart"])


@servers
def test_servers_sync_every_write_and_let_only_the_three_users_in(server: Any, tmp_path: Path) -> None:
    with server(tmp_path, PASSWORDS) as (url, monitoring):
        assert get_json(f"{monitoring}/varz")["jetstream"]["config"]["sync_always"] is True
        assert get_json(f"{monitoring}/varz")["max_payload"] == 64 * 1024
        assert pings(monitoring) == PINGS
        assert get_json(f"{monitoring}/healthz") == {"status": "ok"}
        assert get_json(f"{monitoring}/healthz?js-enabled-only=true") == {"status": "ok"}
        assert greet(url) == "-ERR 'Authorization Violation'"
        for role, user in USERS.items():
            own = PASSWORDS[f"{role.upper()}_PASSWORD"]
            assert greet(url, user=user, **{"pass": own}) == "PONG"
            for other in {*PASSWORDS.values(), "120001"} - {own}:
                assert greet(url, user=user, **{"pass": other}) == "-ERR 'Authorization Violation'"


@servers
def test_servers_know_what_each_user_may(server: Any, tmp_path: Path) -> None:
    create = "$JS.API.STREAM.CREATE.JOBS"
    with server(tmp_path, PASSWORDS) as (url, _):

        def answer(role: str, subject: str) -> str:
            password = PASSWORDS[f"{role.upper()}_PASSWORD"]
            return greet(url, subject, user=USERS[role], **{"pass": password})

        assert answer("operator", create) == "PONG"
        for role in ("worker", "producer"):
            assert answer(role, create) == f"-ERR 'Permissions Violation for Publish to \"{create}\"'"
            assert answer(role, "jobs.count-words") == "PONG"


def allowed(text: str, name: str) -> dict[str, dict[str, list[str]]]:
    """What a block of permissions.conf allows."""
    block = re.search(rf"(?ms)^{name} = \{{\n(.*?)^\}}$", text)
    assert block
    lists = re.findall(r"(?s)(publish|subscribe): \{\s*allow: \[(.*?)\]", block[1])
    return {what: {"allow": re.findall(r'"([^"]+)"', subjects)} for what, subjects in lists}


def test_chart_says_what_the_file_of_permissions_says() -> None:
    users = VALUES["config"]["merge"]["accounts"]["JSWORKER"]["users"]
    assert {user["user"]: user["permissions"] for user in users} == {
        "jsworker-worker": allowed(PERMISSIONS, "MAY_WORK"),
        "jsworker-producer": allowed(PERMISSIONS, "MAY_PRODUCE"),
        "jsworker-operator": allowed(PERMISSIONS, "MAY_OPERATE"),
    }
    assert len(allowed(PERMISSIONS, "MAY_WORK")["publish"]["allow"]) > 5
    assert list(re.findall(r"(?m)^      \{ user: (\S+),", PERMISSIONS)) == [user["user"] for user in users]


def test_users_of_one_kind_are_told_the_consumers_of_all_its_priorities() -> None:
    shown = re.findall(r"(?<= )\$JS\.ACK\.JOBS\.(count-words\S*)\.>", PERMISSIONS)
    assert shown == [consumer_of("count-words", priority) for priority in (NORMAL, HIGH, LOW)]


def test_overlay_single_includes_the_file_of_permissions() -> None:
    assert SINGLE["ConfigMap", "nats-permissions"]["data"] == {"permissions.conf": PERMISSIONS}
    assert "\ninclude permissions.conf\n" in SINGLE["ConfigMap", "nats"]["data"]["nats.conf"]


def test_chart_gives_jsworker_an_account_of_its_own(tmp_path: Path) -> None:
    with chart_server(tmp_path, PASSWORDS) as (_, monitoring):
        accounts = get_json(f"{monitoring}/accountz")
        assert accounts["system_account"] == "SYS"
        assert "JSWORKER" in accounts["accounts"]
        detail = get_json(f"{monitoring}/accountz?acc=JSWORKER")["account_detail"]
        assert detail["jetstream_enabled"] is True


def test_single_server_has_the_ports_that_its_service_and_probes_name() -> None:
    nats = container(SINGLE["StatefulSet", "nats"])
    ports = {port["name"]: port["containerPort"] for port in nats["ports"]}
    config = SINGLE["ConfigMap", "nats"]["data"]["nats.conf"]
    assert f"port: {ports['client']}\n" in config
    assert f"http: {ports['monitor']}\n" in config
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert nats[probe]["httpGet"]["port"] == "monitor"
        assert nats[probe]["httpGet"]["path"].startswith("/healthz")
    (port,) = SINGLE["Service", "nats"]["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (4222, "client")
    mounts = {mount["mountPath"]: mount["name"] for mount in nats["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(SINGLE["StatefulSet", "nats"])["volumes"]}
    assert nats["args"] == ["--config", "/etc/nats/nats.conf"]
    sources = volumes[mounts["/etc/nats"]]["projected"]["sources"]
    assert [source["configMap"]["name"] for source in sources] == ["nats", "nats-permissions"]


def test_stream_has_no_more_copies_than_there_are_servers() -> None:
    replicas = int(SCALE_OUT["ConfigMap", "jsworker"]["data"]["JSWORKER_STREAM_REPLICAS"])
    assert replicas == VALUES["config"]["cluster"]["replicas"] == 3
    assert VALUES["config"]["cluster"]["enabled"] is True
    assert VALUES["config"]["jetstream"]["fileStore"]["pvc"]["enabled"] is True
    alone = int(SINGLE["ConfigMap", "jsworker"]["data"]["JSWORKER_STREAM_REPLICAS"])
    assert alone == SINGLE["StatefulSet", "nats"]["spec"]["replicas"] == 1


def test_passwords_of_servers_come_from_secrets() -> None:
    variables = VALUES["container"]["env"]
    entries = {entry["name"]: entry for entry in container(SINGLE["StatefulSet", "nats"])["env"]}
    for name, secret in SECRETS.items():
        assert variables[name]["valueFrom"]["secretKeyRef"] == secret
        assert variables[f"{name}_QUOTED"] == f'"$({name})"'
        if name != "SYSTEM_PASSWORD":
            assert entries[name]["valueFrom"]["secretKeyRef"] == secret
            assert entries[f"JSWORKER_NATS_{name}"]["value"] == f'"$({name})"'
    assert len(variables) == 2 * len(SECRETS)
    assert len(entries) == 2 * len(USERS)
    for account in VALUES["config"]["merge"]["accounts"].values():
        for user in account["users"]:
            assert re.fullmatch(r"<< \$\w+_QUOTED >>", user["password"])
    assert own_variables(SINGLE["StatefulSet", "jsworker"]).keys().isdisjoint(variables)


def test_chart_runs_its_pods_as_the_namespace_demands() -> None:
    spec = VALUES["podTemplate"]["merge"]["spec"]["securityContext"]
    assert spec["runAsNonRoot"] is True
    assert spec["seccompProfile"] == {"type": "RuntimeDefault"}
    for part in ("container", "reloader", "promExporter"):
        assert VALUES[part]["merge"]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
