"""Scaling, and the PostgreSQL cluster under it: the query counts by index, the numbers fit each other."""

import re
import shutil
import time
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from psycopg.rows import DictRow
from psycopg.sql import SQL, Identifier, Literal

from jsworker.doctor.postgresql_checks import _OF_A_SLOT
from jsworker.embedded import EmbeddedPostgres
from jsworker.ownership.database import Database
from tests.deployment.files import DEPLOY, ROOT, container, own_variables, pod, read_yaml, settings_from
from tests.deployment.rendering import overlay, read_manifests
from tests.ownership.rows import ago, insert_job
from tests.security.guarded import apply_roles
from tests.support.servers import THROWAWAY_SETTINGS, TestServers, new_servers_folder

SCALE_OUT = overlay("scale-out")
SCALED = SCALE_OUT["ScaledObject", "jsworker"]["spec"]
CONFIG: dict[str, str] = SCALE_OUT["ConfigMap", "jsworker"]["data"]
(TRIGGER,) = SCALED["triggers"]
QUERY: str = TRIGGER["metadata"]["query"]
(CLUSTER,) = read_manifests(DEPLOY / "postgres/cluster.yaml")
PARAMETERS: dict[str, str] = CLUSTER["spec"]["postgresql"]["parameters"]


def answer(sql: psycopg.Connection[DictRow]) -> Any:
    row = sql.execute(cast("Any", QUERY)).fetchone()
    assert row is not None
    (value,) = row.values()
    return value


def test_query_counts_jobs_that_wait_are_due_or_run(sql: psycopg.Connection[DictRow]) -> None:
    assert answer(sql) == 0
    for state in ("queued", "queued", "processing", "processing", "processing"):
        insert_job(sql, state)
    insert_job(sql, "scheduled", run_at=ago(1))
    assert answer(sql) == 6
    insert_job(sql, "scheduled", run_at=ago(-3600))
    for state in ("completed", "failed", "cancelled"):
        insert_job(sql, state)
    assert answer(sql) == 6


def test_query_is_answered_by_the_indexes_of_what_waits(sql: psycopg.Connection[DictRow]) -> None:
    sql.execute(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at)"
        " SELECT gen_random_uuid(), 'count-lines', '{}', 'completed', 1, 1, now()"
        " FROM generate_series(1, 20000)"
    )
    sql.execute("ANALYZE jsworker.jobs")
    for state in ("queued", "scheduled", "processing"):
        insert_job(sql, state)
    row = sql.execute(cast("Any", f"EXPLAIN (FORMAT JSON) {QUERY}")).fetchone()
    assert row is not None
    plan = str(row["QUERY PLAN"])
    assert "Seq Scan" not in plan
    assert all(f"'{index}'" in plan for index in ("jobs_queued_in_order", "jobs_due", "jobs_owned"))


def test_query_stops_counting_only_beyond_the_largest_fleet() -> None:
    limits = [int(limit) for limit in re.findall(r"LIMIT (\d+)", QUERY)]
    assert len(limits) == 3
    assert min(limits) > SCALED["maxReplicaCount"] * float(TRIGGER["metadata"]["targetQueryValue"])


def test_target_is_the_job_slots_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {**CONFIG, **own_variables(SCALE_OUT["StatefulSet", "jsworker"])}
    settings = settings_from(variables, tmp_path, monkeypatch)
    slots = settings.concurrency * settings.processes
    assert float(TRIGGER["metadata"]["targetQueryValue"]) == slots


def test_fleet_keeps_three_pods_and_shrinks_slowly() -> None:
    reference = SCALED["scaleTargetRef"]
    assert (reference["kind"], reference["name"]) in SCALE_OUT
    assert SCALED["minReplicaCount"] >= 3
    down = SCALED["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    grace = pod(SCALE_OUT["StatefulSet", "jsworker"])["terminationGracePeriodSeconds"]
    assert down["stabilizationWindowSeconds"] >= 300
    assert [policy["type"] for policy in down["policies"]] == ["Pods"]
    assert all(policy["periodSeconds"] > grace for policy in down["policies"])


def test_keda_logs_in_to_count_and_checks_whom_it_asks() -> None:
    metadata = TRIGGER["metadata"]
    url = CONFIG["JSWORKER_DATABASE_URL"]
    service, namespace, suffix = metadata["host"].split(".")
    assert suffix == "svc"  # as the certificate says
    assert metadata["sslmode"] == "verify-full"
    assert f"@{service}:{metadata['port']}/{metadata['dbName']}?" in url
    assert namespace == SCALE_OUT["Namespace", "jsworker"]["metadata"]["name"]
    login = SCALE_OUT["TriggerAuthentication", TRIGGER["authenticationRef"]["name"]]["spec"]
    assert login["secretTargetRef"] == [
        {"parameter": "password", "name": "jsworker-metrics", "key": "password"}
    ]
    (role,) = (
        role
        for role in CLUSTER["spec"]["managed"]["roles"]
        if role["passwordSecret"] == {"name": "jsworker-metrics"}
    )
    assert metadata["userName"] == role["name"] == "jobs_metrics"


def test_keda_has_the_authority_of_the_database() -> None:
    values = read_yaml((DEPLOY / "keda/helm-values.yaml").read_text())
    (variable,) = values["env"]
    (volume,) = values["volumes"]["keda"]["extraVolumes"]
    (mount,) = values["volumes"]["keda"]["extraVolumeMounts"]
    assert variable == {"name": "PGSSLROOTCERT", "value": f"{mount['mountPath']}/ca.crt"}
    assert mount["name"] == volume["name"]
    guide = (ROOT / "docs/kubernetes.md").read_text()
    assert f"create configmap {volume['configMap']['name']} --from-file=ca.crt" in guide


def test_copy_of_the_authority_can_be_made_again() -> None:
    """It is valid for 90 days, and `create` alone refuses a ConfigMap that is there."""
    for page in ("docs/kubernetes.md", "docs/runbook/workers.md"):
        text = (ROOT / page).read_text()
        [copy] = re.findall(r"create configmap jsworker-postgres-ca (.*\n.*)\n", text)
        assert "--dry-run=client --output yaml \\\n  | kubectl apply --filename -" in copy
        assert "kubectl --namespace keda rollout restart deployment/keda-operator" in text


def test_those_who_count_may_ask_the_query_and_see_no_payload(
    sql: psycopg.Connection[DictRow], database_url: str
) -> None:
    apply_roles(database_url)
    insert_job(sql)
    with sql.transaction(force_rollback=True):
        sql.execute("SET LOCAL ROLE jsworker_metrics")
        assert answer(sql) == 1


def test_cluster_takes_no_login_without_tls() -> None:
    folder = new_servers_folder()
    server = EmbeddedPostgres(folder / "postgres", settings=THROWAWAY_SETTINGS)
    try:
        server.start()
        with psycopg.connect(server.url, autocommit=True) as connection:
            lines = CLUSTER["spec"]["postgresql"]["pg_hba"]
            # As the operator does: its own last rule follows, which takes anybody with a password.
            written = "\n".join([*lines, "host all all all scram-sha-256", ""])
            (server.cluster / "pg_hba.conf").write_text(written)
            faults = "SELECT error FROM pg_hba_file_rules WHERE error IS NOT NULL"
            # A server without TLS says of the line that it never matches, and takes the file.
            assert "hostssl record cannot match because SSL is" in str(connection.execute(faults).fetchall())
            connection.execute("SELECT pg_reload_conf()")

        def refused() -> bool:
            try:
                psycopg.connect(server.url).close()
            except psycopg.OperationalError as error:
                return "rejects connection" in str(error)
            return False

        give_up_at = time.monotonic() + 60
        while not refused():
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
    finally:
        server.stop()
        shutil.rmtree(folder)


def test_workers_check_the_certificate_of_the_cluster() -> None:
    name = CLUSTER["metadata"]["name"]
    url = CONFIG["JSWORKER_DATABASE_URL"]
    assert f"@{name}-rw:5432/{CLUSTER['spec']['bootstrap']['initdb']['database']}?" in url
    assert "sslmode=verify-full&sslrootcert=/run/secrets/database-ca/ca.crt" in url
    own = SCALE_OUT["ConfigMap", "jsworker-migration"]["data"]["JSWORKER_DATABASE_URL"]
    assert own == url.replace("jobs_worker@", "jobs_migration@")
    operators = SCALE_OUT["ConfigMap", "jsworker-operator"]["data"]["JSWORKER_DATABASE_URL"]
    assert operators == url.replace("jobs_worker@", "jobs_operator@")
    for workload in (SCALE_OUT["StatefulSet", "jsworker"], SCALE_OUT["Job", "jsworker-migration"]):
        mounts = {mount["name"]: mount["mountPath"] for mount in container(workload)["volumeMounts"]}
        assert mounts["database-ca"] == "/run/secrets/database-ca"
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        assert volumes["database-ca"]["secret"] == {
            "secretName": f"{name}-ca",
            "defaultMode": 0o440,
            "items": [{"key": "ca.crt", "path": "ca.crt"}],
        }


def test_cluster_lets_in_who_has_business_there() -> None:
    policy = SCALE_OUT["NetworkPolicy", "postgres"]["spec"]
    own = {"cnpg.io/cluster": CLUSTER["metadata"]["name"]}
    assert policy["podSelector"] == {"matchLabels": own}
    by_port: dict[int, list[dict[str, str]]] = {}
    for rule in policy["ingress"]:
        for port in rule["ports"]:
            for sender in rule["from"]:
                ((_, selector),) = sender.items()
                by_port.setdefault(port["port"], []).append(selector["matchLabels"])
    name = "kubernetes.io/metadata.name"
    workers = {"app.kubernetes.io/name": "jsworker"}
    assert by_port == {
        5432: [workers, {name: "keda"}, own, {name: "cnpg-system"}],
        8000: [own, {name: "cnpg-system"}],
        9187: [{name: "monitoring"}],
    }


def test_workers_are_let_out_to_the_cluster() -> None:
    *_, postgres = SCALE_OUT["NetworkPolicy", "jsworker"]["spec"]["egress"]
    assert postgres["to"] == [
        {"podSelector": {"matchLabels": {"cnpg.io/cluster": CLUSTER["metadata"]["name"]}}}
    ]
    assert CLUSTER["metadata"]["namespace"] == SCALE_OUT["Namespace", "jsworker"]["metadata"]["name"]


def test_commits_are_on_two_of_three_servers() -> None:
    spec = CLUSTER["spec"]
    assert spec["instances"] == 3
    assert spec["postgresql"]["synchronous"] == {
        "method": "any",
        "number": 1,
        "dataDurability": "required",
        "failoverQuorum": True,
    }
    assert spec["affinity"]["podAntiAffinityType"] == "required"
    assert not {"fsync", "synchronous_commit", "full_page_writes"} & set(PARAMETERS)


def test_cluster_has_connections_for_the_largest_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {**CONFIG, **own_variables(SCALE_OUT["StatefulSet", "jsworker"])}
    settings = settings_from(variables, tmp_path, monkeypatch)
    database = Database("postgresql://nobody@127.0.0.1:1/none", statement_timeout=1.0)
    pools = (database._statements, database._by_key, database._heartbeats)
    process = sum(pool._lendable._value for pool in pools) + _OF_A_SLOT * settings.concurrency
    assert process == 43  # as the files say
    fleet = process * settings.processes * SCALED["maxReplicaCount"]
    limits = {role["name"]: role["connectionLimit"] for role in CLUSTER["spec"]["managed"]["roles"]}
    assert fleet <= limits["jobs_worker"]
    assert "jobs_operator" in limits
    migration_and_the_cluster_itself = 25
    assert sum(limits.values()) + migration_and_the_cluster_itself < int(PARAMETERS["max_connections"])


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_are_taken_by_a_real_server(name: str, servers: TestServers) -> None:
    with psycopg.connect(servers.postgres.url, autocommit=True) as connection:
        known = connection.execute("SELECT enumvals FROM pg_settings WHERE name = %s", [name]).fetchone()
        assert known is not None
        # Written to a file that this server does not read again before the line is gone.
        try:
            change = SQL("ALTER SYSTEM SET {} = {}").format(Identifier(name), Literal(PARAMETERS[name]))
            connection.execute(change)
        finally:
            connection.execute(SQL("ALTER SYSTEM RESET {}").format(Identifier(name)))
