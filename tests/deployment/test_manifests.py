"""Every manifest: valid by Kubernetes' own schemas, or by what its operator demands, and restricted."""

import copy
from typing import Any

import pytest

from tests.deployment.custom_resources import KEDA_CHART, NATS_CHART, check, shape_of
from tests.deployment.files import DEPLOY, KUBERNETES, container, pod, read_yaml
from tests.deployment.rendering import OVERLAYS, Manifest, overlay, read_manifests, render
from tests.deployment.shapes import Path, Shape

CLUSTER = DEPLOY / "postgres/cluster.yaml"
RENDERED: dict[str, list[Manifest]] = {
    "base": list(render(KUBERNETES / "base").values()),
    "dashboard": list(render(KUBERNETES / "dashboard").values()),
    **{name: list(overlay(name).values()) for name in OVERLAYS},
    "postgres": read_manifests(CLUSTER),
}
EACH = {
    f"{where} {manifest['kind']} {manifest['metadata']['name']}": manifest
    for where, manifests in RENDERED.items()
    for manifest in manifests
}
VALUES: dict[str, Any] = read_yaml((DEPLOY / "nats/helm-values.yaml").read_text())
KEDA_VALUES: dict[str, Any] = read_yaml((DEPLOY / "keda/helm-values.yaml").read_text())
WORKLOADS = [
    name for name, manifest in EACH.items() if manifest["kind"] in ("StatefulSet", "Job", "Deployment")
]


class Invalid(Exception):
    """Kubernetes refuses a manifest."""


def validate(manifest: Manifest) -> None:
    if shape := shape_of(manifest):
        check(manifest, shape)
        return
    # Here: it takes a second, which not every process of a test run should.
    import kubernetes_validate  # type: ignore[import-untyped] # it brings no types  # noqa: PLC0415

    try:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Invalid(str(error)) from error


@pytest.mark.parametrize("name", EACH)
def test_manifest_is_valid(name: str) -> None:
    validate(EACH[name])


@pytest.mark.parametrize("name", [name for name in EACH if name.startswith("scale-out")])
def test_misspelled_key_is_refused(name: str) -> None:
    wrong = copy.deepcopy(EACH[name])
    part = wrong.get("spec", wrong)
    part["misspelled"] = "1"
    with pytest.raises((Invalid, AssertionError)):
        validate(wrong)


def misspelled(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A copy, one of whose keys has a letter too many."""
    wrong = copy.deepcopy(document)
    place: Any = wrong
    for part in path[:-1]:
        place = place[part]
    place[f"{path[-1]}x"] = place.pop(path[-1])
    return wrong


SHAPED: dict[str, tuple[dict[str, Any], Shape]] = {
    **{name: (manifest, shape) for name, manifest in EACH.items() if (shape := shape_of(manifest))},
    "nats helm values": (VALUES, NATS_CHART),
    "keda helm values": (KEDA_VALUES, KEDA_CHART),
}


@pytest.mark.parametrize("name", SHAPED)
def test_no_key_for_an_operator_or_the_chart_can_be_misspelled(name: str) -> None:
    document, shape = SHAPED[name]
    assert list(shape.faults(document, name)) == []
    paths = list(shape.keys(document))
    assert len(paths) > 5
    for path in paths:
        assert list(shape.faults(misspelled(document, path), name)), path


def chart_pod() -> Manifest:
    """The pod that the chart makes of the values, as far as they say something about it."""
    containers = []
    for name, part in (("nats", "container"), ("reloader", "reloader"), ("prom-exporter", "promExporter")):
        containers.append({"name": name, "image": name, **VALUES[part]["merge"]})
    variables = VALUES["container"]["env"]
    containers[0]["env"] = [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, **value}
        for name, value in variables.items()
    ]
    spreads = VALUES["podTemplate"]["topologySpreadConstraints"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "nats-0"},
        "spec": {
            "containers": containers,
            "topologySpreadConstraints": [{"topologyKey": key, **spread} for key, spread in spreads.items()],
            **VALUES["podTemplate"]["merge"]["spec"],
        },
    }


def test_what_is_merged_into_the_pods_of_the_nats_chart_is_valid() -> None:
    validate(chart_pod())
    wrong = chart_pod()
    wrong["spec"]["containers"][1]["securityContext"] = {"allowPrivilegeEscalations": False}
    with pytest.raises(Invalid):
        validate(wrong)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_that_no_policy_names_may_do_nothing(name: str) -> None:
    rendered = overlay(name)
    assert rendered["NetworkPolicy", "default-deny"]["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }
    policies = [manifest["spec"] for (kind, _), manifest in rendered.items() if kind == "NetworkPolicy"]
    assert all(policy["policyTypes"] == ["Ingress", "Egress"] for policy in policies)
    # Every sender is named; every receiver too, but for the API of Kubernetes.
    assert all(rule["from"] for policy in policies for rule in policy.get("ingress", []))
    anywhere = [rule for policy in policies for rule in policy.get("egress", []) if "to" not in rule]
    api = {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}
    assert anywhere == ([api] if name == "scale-out" else [])


@pytest.mark.parametrize("name", OVERLAYS)
def test_names_are_asked_of_the_clusters_dns_alone(name: str) -> None:
    rules = [
        rule
        for (kind, _), manifest in overlay(name).items()
        if kind == "NetworkPolicy"
        for rule in manifest["spec"].get("egress", [])
        if 53 in [port["port"] for port in rule["ports"]]
    ]
    assert rules
    for rule in rules:
        assert rule["to"] == [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
                "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
            }
        ]


def test_the_dashboard_is_reached_by_the_ingress_controller_alone_and_asks_for_a_login() -> None:
    rendered = render(KUBERNETES / "dashboard")
    deployment, policy = (rendered[kind, "jsworker-dashboard"] for kind in ("Deployment", "NetworkPolicy"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    one = container(deployment)
    [port] = one["ports"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
        rendered["Service", "jsworker-dashboard"]["spec"]["selector"],
    ):
        assert selector == labels
    # What it may reach is said by the policy of the workers, which it is one of by name.
    workers = render(KUBERNETES / "base")["NetworkPolicy", "jsworker"]["spec"]["podSelector"]["matchLabels"]
    assert workers.items() <= labels.items()
    [rule] = policy["spec"]["ingress"]
    assert rule["from"]
    assert [each["port"] for each in rule["ports"]] == [port["name"]]
    assert one["args"][0] == "dashboard"
    assert f"--port={port['containerPort']}" in one["args"]
    assert "--logins=/run/secrets/dashboard/logins" in one["args"]
    assert "--read-role=jsworker_reader" in one["args"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert one[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    [host] = rendered["Ingress", "jsworker-dashboard"]["spec"]["tls"][0]["hosts"]
    assert f"--allow-host={host}" in one["args"]


def test_the_dashboard_finds_the_authority_of_the_database_where_the_settings_of_scale_out_say() -> None:
    wanted = overlay("scale-out")["ConfigMap", "jsworker"]["data"]["JSWORKER_DATABASE_URL"]
    deployment = render(KUBERNETES / "dashboard")["Deployment", "jsworker-dashboard"]
    [mount] = [each for each in container(deployment)["volumeMounts"] if each["name"] == "database-ca"]
    assert f"sslrootcert={mount['mountPath']}/ca.crt" in wanted
    [volume] = [each for each in pod(deployment)["volumes"] if each["name"] == "database-ca"]
    workers = pod(overlay("scale-out")["StatefulSet", "jsworker"])["volumes"]
    [theirs] = [each for each in workers if each["name"] == "database-ca"]
    assert volume["secret"] == theirs["secret"] | {"optional": True}


def test_statefulset_without_a_selector_is_refused() -> None:
    wrong = render(KUBERNETES / "base")["StatefulSet", "jsworker"]
    del wrong["spec"]["selector"]
    with pytest.raises(Invalid, match="selector"):
        validate(wrong)


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_are_restricted(name: str) -> None:
    workload = EACH[name]
    spec, one = pod(workload), container(workload)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    security = spec["securityContext"]
    user = security["runAsUser"]
    assert user > 0
    assert security == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    limited = {name: one["resources"]["requests"][name] for name in ("memory", "ephemeral-storage")}
    assert one["resources"]["limits"] == limited
    assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume)
    assert one["resources"]["requests"]["cpu"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_mount_all_of_their_volumes(name: str) -> None:
    workload = EACH[name]
    mounted = [mount["name"] for mount in container(workload)["volumeMounts"]]
    volumes = [volume["name"] for volume in pod(workload)["volumes"]]
    volumes += [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
    assert sorted(mounted) == sorted(volumes)


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_and_services_name_ports_that_are_there(name: str) -> None:
    workload = EACH[name]
    one = container(workload)
    names = {port["name"] for port in one.get("ports", [])}
    probes = [one[probe] for probe in ("startupProbe", "livenessProbe", "readinessProbe") if probe in one]
    assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= names


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_find_the_pods_that_they_are_for(name: str) -> None:
    rendered = overlay(name)
    pods = {
        key: manifest["spec"]["template"]["metadata"]["labels"]
        for key, manifest in rendered.items()
        if key[0] in ("StatefulSet", "Job")
    }

    def found(selector: dict[str, Any]) -> set[tuple[str, str]]:
        wanted = selector["matchLabels"].items()
        return {key for key, labels in pods.items() if wanted <= labels.items()}

    workers, migration = ("StatefulSet", "jsworker"), ("Job", "jsworker-migration")
    assert found(rendered["NetworkPolicy", "jsworker"]["spec"]["podSelector"]) == {workers, migration}
    assert found(rendered["PodDisruptionBudget", "jsworker"]["spec"]["selector"]) == {workers}
    assert found({"matchLabels": rendered["Service", "jsworker"]["spec"]["selector"]}) == {workers}
    for spread in pod(rendered[workers])["topologySpreadConstraints"]:
        assert found(spread["labelSelector"]) == {workers}
    for kind, own in pods:
        if kind == "StatefulSet":
            spec = rendered[kind, own]["spec"]
            assert found(spec["selector"]) == {(kind, own)}
            assert ("Service", spec["serviceName"]) in rendered
    if name == "scale-out":
        assert found(rendered["PodMonitor", "jsworker"]["spec"]["selector"]) == {workers}
