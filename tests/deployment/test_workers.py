"""The workers and their migration: settings, probes, grace period, network, in both overlays."""

from pathlib import Path
from typing import Any

import pytest

from jsworker.core.settings import Settings
from jsworker.core.targets import load_processor_class
from tests.deployment.files import DEPLOY, KUBERNETES, ROOT, container, given_variables, pod, settings_from
from tests.deployment.rendering import OVERLAYS, Manifest, overlay, read_manifests
from tests.deployment.rules import alerts

RENDERED = {name: overlay(name) for name in OVERLAYS}
SECRETS = "/run/secrets/jsworker"


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> dict[tuple[str, str], Manifest]:
    return RENDERED[request.param]


@pytest.fixture
def workers(rendered: dict[tuple[str, str], Manifest]) -> Manifest:
    return rendered["StatefulSet", "jsworker"]


@pytest.fixture
def migration(rendered: dict[tuple[str, str], Manifest]) -> Manifest:
    return rendered["Job", "jsworker-migration"]


@pytest.fixture
def config(rendered: dict[tuple[str, str], Manifest]) -> dict[str, str]:
    data: dict[str, str] = rendered["ConfigMap", "jsworker"]["data"]
    return data


@pytest.fixture
def settings(
    rendered: dict[tuple[str, str], Manifest],
    workers: Manifest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Settings:
    return settings_from(given_variables(rendered, workers), tmp_path, monkeypatch)


def test_settings_are_accepted_and_tell_who_the_worker_is(workers: Manifest, settings: Settings) -> None:
    assert settings.hostname == "jsworker-0"
    assert settings.pod_uid == "c2f7b8f0-6c0e-4d9e-9d4e-0a4a0f4ff3f1"
    assert settings.container == container(workers)["name"]
    assert settings.database_dsn().startswith(
        "postgresql://jobs_worker:%2Frun%2Fsecrets%2Fjsworker%2Fpassword@"
    )


def test_migration_is_told_the_same_but_for_its_logins(
    rendered: dict[tuple[str, str], Manifest],
    migration: Manifest,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = settings_from(given_variables(rendered, migration), tmp_path, monkeypatch)
    assert own.database_url == settings.database_url.replace("jobs_worker@", "jobs_migration@")
    differs = {name for name in Settings.model_fields if getattr(own, name) != getattr(settings, name)}
    who = {"hostname", "pod_uid", "container"}
    assert differs - who == {"database_url", "nats_user", "nats_inbox_prefix"}


def test_grace_period_is_longer_than_a_worker_takes_to_stop(workers: Manifest, settings: Settings) -> None:
    grace = pod(workers)["terminationGracePeriodSeconds"]
    assert grace == settings.grace_period
    ends, kills = (2 * settings.statement_timeout + seconds for seconds in (4, 1))
    assert grace > settings.shutdown_timeout + ends + kills
    formula = "`JSWORKER_SHUTDOWN_TIMEOUT` + 4 × `JSWORKER_STATEMENT_TIMEOUT` + 5 s"
    assert formula in (ROOT / "docs/operate/checklist.md").read_text()


def test_drain_of_nodes_takes_one_worker_at_a_time_also_in_an_outage(rendered: Any) -> None:
    """Then no worker is ready, and each holds the outcomes that it cannot write."""
    budget = rendered["PodDisruptionBudget", "jsworker"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget.get("unhealthyPodEvictionPolicy", "IfHealthyBudget") == "IfHealthyBudget"


def test_probes_ask_the_port_that_the_settings_open(workers: Manifest, settings: Settings) -> None:
    (port,) = container(workers)["ports"]
    assert port == {"name": "http", "containerPort": settings.http_port}
    assert settings.http_host == "0.0.0.0"  # noqa: S104 -- a pod's own
    asked = {
        probe: container(workers)[probe]["httpGet"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert asked == {
        "startupProbe": {"path": "/startupz", "port": "http"},
        "livenessProbe": {"path": "/livez", "port": "http"},
        "readinessProbe": {"path": "/readyz", "port": "http"},
    }


def test_probes_leave_time(workers: Manifest, settings: Settings) -> None:
    def patience(probe: str) -> int:
        given = container(workers)[probe]
        assert given["timeoutSeconds"] <= given["periodSeconds"]
        return int(given["periodSeconds"] * given["failureThreshold"])

    assert patience("startupProbe") >= settings.startup_timeout + 60
    missing = alerts()["JsworkerProcessesMissing"]["for"]
    assert int(missing.removesuffix("m")) * 60 > patience("startupProbe")
    assert patience("livenessProbe") >= 60
    assert patience("readinessProbe") <= 15


def test_pods_mount_what_their_settings_name(
    workers: Manifest, migration: Manifest, config: dict[str, str]
) -> None:
    files = {value for variable, value in config.items() if variable.endswith("_FILE")}
    assert files == {f"{SECRETS}/password", f"{SECRETS}/nats-password"}
    settings, own = {"configMapRef": {"name": "jsworker"}}, {"configMapRef": {"name": "jsworker-migration"}}
    for workload, secret, given in (
        (workers, "jsworker-worker", [settings]),
        (migration, "jsworker-migration", [settings, own]),
    ):
        one = container(workload)
        assert one["envFrom"] == given
        mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        assert "emptyDir" in volumes[mounts["/tmp"]]  # noqa: S108 -- the container's
        assert volumes[mounts[SECRETS]]["secret"] == {"secretName": secret, "defaultMode": 0o440}


def test_workers_are_named_by_the_service_and_start_together(rendered: Any, workers: Manifest) -> None:
    service = rendered["Service", workers["spec"]["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == workers["spec"]["template"]["metadata"]["labels"]
    assert workers["spec"]["podManagementPolicy"] == "Parallel"


def test_migration_is_a_job_of_the_workers_image(
    migration: Manifest, workers: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "deploy"))
    assert container(migration)["command"] == ["/bin/sh", "-c"]
    _, *processors = container(workers)["args"]
    (script,) = container(migration)["args"]
    kinds = " ".join(load_processor_class(processor).kind for processor in processors)
    assert script == f"ulimit -c 0 && jsworker db upgrade && exec jsworker stream ensure {kinds}"
    assert container(migration)["image"] == container(workers)["image"]
    assert pod(migration)["restartPolicy"] == "Never"
    assert migration["spec"]["activeDeadlineSeconds"] >= 4 * 900  # what 100 million rows take
    (rule,) = migration["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {
        "containerName": container(migration)["name"],
        "operator": "In",
        "values": [2],
    }
    labels = migration["spec"]["template"]["metadata"]["labels"]
    assert labels != workers["spec"]["template"]["metadata"]["labels"]


def test_workers_run_a_processor_that_exists(workers: Manifest) -> None:
    command, target = container(workers)["args"]
    module, _, processor = target.partition(":")
    assert command == "run"
    assert f"class {processor}(" in (DEPLOY / f"{module}.py").read_text()
    assert f"COPY {module}.py /app/" in (ROOT / "docs/kubernetes.md").read_text()


CONFIGS = {("ConfigMap", name) for name in ("jsworker", "jsworker-migration", "jsworker-operator")}


@pytest.mark.parametrize(
    ("component", "manifests"),
    [
        ("migration", {("Job", "jsworker-migration")}),
        # Not the Job of the migration: its template cannot be changed, and the old version's would fail.
        ("worker", {(kind, "jsworker") for kind in ("StatefulSet", "Service", "PodDisruptionBudget")}),
    ],
)
def test_rollout_and_rollback_select_settings_and(
    rendered: Any, component: str, manifests: set[tuple[str, str]]
) -> None:
    selector = f"--selector 'app.kubernetes.io/component in (config, {component})'"
    assert selector in (ROOT / "docs/kubernetes.md").read_text()
    selected = {
        key
        for key, manifest in rendered.items()
        if manifest["metadata"]["labels"].get("app.kubernetes.io/component") in ("config", component)
    }
    assert selected == CONFIGS | manifests


def test_network_lets_out_to_dns_and_servers_and_in_for_metrics(rendered: Any, workers: Manifest) -> None:
    spec = rendered["NetworkPolicy", "jsworker"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (ingress,) = spec["ingress"]
    assert ingress["ports"] == [{"protocol": "TCP", "port": container(workers)["ports"][0]["name"]}]
    assert ingress["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    dns, nats, postgres = spec["egress"]
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    assert [port["port"] for port in nats["ports"]] == [4222]
    assert [port["port"] for port in postgres["ports"]] == [5432]
    assert len(nats["to"]) == len(postgres["to"]) == 1


def test_servers_of_the_overlay_single_are_those_that_workers_are_let_out_to() -> None:
    rendered = RENDERED["single"]
    _, *servers = rendered["NetworkPolicy", "jsworker"]["spec"]["egress"]
    config = rendered["ConfigMap", "jsworker"]["data"]
    for name, rule in zip(("nats", "postgres"), servers, strict=True):
        labels = rendered["StatefulSet", name]["spec"]["template"]["metadata"]["labels"]
        assert rule["to"] == [{"podSelector": {"matchLabels": labels}}]
        (entry,) = rendered["NetworkPolicy", name]["spec"]["ingress"]
        worker = rendered["StatefulSet", "jsworker"]["spec"]["template"]["metadata"]["labels"]
        assert entry["from"][0]["podSelector"]["matchLabels"].items() <= worker.items()
        (service,) = rendered["Service", name]["spec"]["ports"]
        assert f"{name}:{service['port']}" in config["JSWORKER_DATABASE_URL"] + config["JSWORKER_NATS_URL"]


def test_single_postgres_is_the_database_that_workers_ask_for() -> None:
    rendered = RENDERED["single"]
    postgres = container(rendered["StatefulSet", "postgres"])
    (database,) = (entry["value"] for entry in postgres["env"] if entry["name"] == "POSTGRES_DB")
    config = rendered["ConfigMap", "jsworker"]["data"]
    assert config["JSWORKER_DATABASE_URL"] == f"postgresql://jobs_worker@postgres:5432/{database}"
    assert postgres["image"].partition(":")[2].startswith("18")


def test_overlays_differ_in_number_and_spreading() -> None:
    single, many = (RENDERED[name]["StatefulSet", "jsworker"]["spec"] for name in OVERLAYS)
    assert single["replicas"] == 1
    assert "replicas" not in many  # KEDA's business: every apply would set the fleet back
    hard = [
        spread["topologyKey"]
        for spread in many["template"]["spec"]["topologySpreadConstraints"]
        if spread["whenUnsatisfiable"] == "DoNotSchedule"
    ]
    assert hard == ["kubernetes.io/hostname"]
    soft = single["template"]["spec"]["topologySpreadConstraints"]
    assert {spread["whenUnsatisfiable"] for spread in soft} == {"ScheduleAnyway"}


def test_base_lists_every_setting_once() -> None:
    settings, _, _ = read_manifests(KUBERNETES / "base/config.yaml")
    text, _, _ = (KUBERNETES / "base/config.yaml").read_text().split("---\n")
    assert all(text.count(f"\n  {variable}:") == 1 for variable in settings["data"])
