"""What operators and the NATS chart take, as far as this project uses it; anything else is refused.

Facts of their own schemas, read from:

* CloudNativePG 1.30.1, ``api/v1/cluster_types.go`` (f844d3a); ``failoverQuorum`` has been there since 1.28.
* KEDA, ``apis/keda/v1alpha1/scaledobject_types.go`` (01ee1d3), the CRD of TriggerAuthentication (059610c),
  and the scaler, ``pkg/scalers/postgresql_scaler.go`` (02d4b80).
* prometheus-operator, the CRDs of PodMonitor 0.87.0 (0ff52b3) and PrometheusRule 0.82.2 (01fad0d).
* The chart keda of kedacore/charts, ``values.yaml``; the driver reads PGSSLROOTCERT as libpq does.
* The chart nats of nats-io/k8s, ``values.yaml`` for nats-server 2.11.1 (0cdf8b8) and 2.12.4 (b30d530).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.deployment.shapes import Each, Fields, Keyed, Shape, Text, Value

Manifest = Mapping[str, Any]

CHECKED_ELSEWHERE = Shape()
"""Kubernetes' or nats-server's own words, which their validators see to."""

BOOLEAN = Value(bool)
NUMBER = Value(int)
TEXT = Text()
NAME = Text(r"[a-z]([a-z0-9-]*[a-z0-9])?")
QUANTITY = Text(r"\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?")
DECIMAL = Text(r"\d+(\.\d+)?")
DURATION = Text(r"0|(?=.)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
NAMED = Fields({"name": NAME})
KEY_OF = Fields({"name": NAME, "key": TEXT})
ENABLED = Fields({"enabled": BOOLEAN})

POLICY = Fields({"type": Text("Pods|Percent"), "value": NUMBER, "periodSeconds": NUMBER})
BEHAVIOR = Fields(
    {"stabilizationWindowSeconds": NUMBER, "policies": Each(POLICY)},
    {"selectPolicy": Text("Max|Min|Disabled")},
)
POSTGRESQL_SCALER = Fields(
    {
        "host": TEXT,
        "port": DECIMAL,
        "dbName": TEXT,
        "userName": TEXT,
        "sslmode": TEXT,
        "query": TEXT,
        "targetQueryValue": DECIMAL,
    },
    {"activationTargetQueryValue": DECIMAL},
)
SCALED_OBJECT = Fields(
    {
        "scaleTargetRef": Fields({"name": NAME}, {"apiVersion": TEXT, "kind": TEXT}),
        "minReplicaCount": NUMBER,
        "maxReplicaCount": NUMBER,
        "advanced": Fields(
            {
                "horizontalPodAutoscalerConfig": Fields(
                    {"behavior": Fields({"scaleUp": BEHAVIOR, "scaleDown": BEHAVIOR})}
                )
            }
        ),
        "triggers": Each(
            Fields(
                {"type": Text("postgresql"), "metadata": POSTGRESQL_SCALER},
                {
                    "name": TEXT,
                    "metricType": Text("AverageValue|Value"),
                    "authenticationRef": Fields({"name": NAME}, {"kind": TEXT}),
                },
            )
        ),
    },
    {"pollingInterval": NUMBER},
)
TRIGGER_AUTHENTICATION = Fields(
    {"secretTargetRef": Each(Fields({"parameter": TEXT, "name": NAME, "key": TEXT}))}
)

POD_MONITOR = Fields(
    {
        "selector": Fields({"matchLabels": Keyed(TEXT)}),
        "podMetricsEndpoints": Each(
            Fields(
                {"port": TEXT},
                {"path": TEXT, "scheme": Text("https?"), "interval": DURATION, "scrapeTimeout": DURATION},
            )
        ),
    }
)
ALERT = Fields(
    {"alert": TEXT, "expr": TEXT, "for": DURATION, "labels": Keyed(TEXT), "annotations": Keyed(TEXT)},
    {"keep_firing_for": DURATION},
)
PROMETHEUS_RULE = Fields(
    {"groups": Each(Fields({"name": TEXT, "rules": Each(ALERT)}, {"interval": DURATION}))}
)

POSTGRES_ROLE = Fields(
    {"name": TEXT},
    {
        "ensure": Text("present|absent"),
        "login": BOOLEAN,
        "inRoles": Each(TEXT),
        "connectionLimit": NUMBER,
        "passwordSecret": NAMED,
    },
)
POSTGRES_CLUSTER = Fields(
    {
        "instances": NUMBER,
        "bootstrap": Fields(
            {
                "initdb": Fields(
                    {"database": TEXT, "owner": TEXT, "secret": NAMED},
                    {
                        "encoding": TEXT,
                        "postInitApplicationSQLRefs": Fields({"configMapRefs": Each(KEY_OF)}),
                    },
                )
            }
        ),
        "postgresql": Fields(
            {
                "synchronous": Fields(
                    {"method": Text("any|first"), "number": NUMBER},
                    {"dataDurability": Text("required|preferred"), "failoverQuorum": BOOLEAN},
                ),
                "parameters": Keyed(TEXT),
            },
            {"pg_hba": Each(TEXT)},
        ),
        "storage": Fields({"size": QUANTITY}, {"storageClass": NAME}),
    },
    {
        # Tags that name no flavour and no Debian are no longer made.
        "imageName": Text(r"ghcr\.io/cloudnative-pg/postgresql:\d+(\.\d+)?-(minimal|standard)-[a-z]+"),
        "managed": Fields({"roles": Each(POSTGRES_ROLE)}),
        "walStorage": Fields({"size": QUANTITY}, {"storageClass": NAME}),
        "resources": Fields({}, {"requests": Keyed(QUANTITY), "limits": Keyed(QUANTITY)}),
        "affinity": Fields(
            {},
            {
                "enablePodAntiAffinity": BOOLEAN,
                "podAntiAffinityType": Text("required|preferred"),
                "topologyKey": TEXT,
            },
        ),
        "enablePDB": BOOLEAN,
    },
)

PVC = Fields({"enabled": BOOLEAN}, {"size": QUANTITY, "storageClassName": NAME})
JETSTREAM = Fields(
    {"enabled": BOOLEAN},
    {
        "memoryStore": Fields({"enabled": BOOLEAN}, {"maxSize": QUANTITY}),
        "fileStore": Fields({"enabled": BOOLEAN}, {"dir": TEXT, "maxSize": QUANTITY, "pvc": PVC}),
        "merge": CHECKED_ELSEWHERE,
    },
)
NATS_CHART = Fields(
    {
        "config": Fields(
            {"cluster": Fields({"enabled": BOOLEAN}, {"port": NUMBER, "replicas": NUMBER})},
            {
                "jetstream": JETSTREAM,
                "monitor": Fields({"enabled": BOOLEAN}, {"port": NUMBER}),
                "merge": CHECKED_ELSEWHERE,
            },
        ),
        "container": Fields(
            {},
            {
                "image": Fields({}, {"repository": TEXT, "tag": TEXT}),
                "env": CHECKED_ELSEWHERE,
                "merge": CHECKED_ELSEWHERE,
            },
        ),
        "reloader": Fields({"enabled": BOOLEAN}, {"merge": CHECKED_ELSEWHERE}),
        "promExporter": Fields(
            {"enabled": BOOLEAN}, {"port": NUMBER, "podMonitor": ENABLED, "merge": CHECKED_ELSEWHERE}
        ),
        "podTemplate": Fields(
            {}, {"topologySpreadConstraints": CHECKED_ELSEWHERE, "merge": CHECKED_ELSEWHERE}
        ),
        "podDisruptionBudget": ENABLED,
        "natsBox": ENABLED,
    }
)
"""The values of the chart."""

KEDA_CHART = Fields(
    {
        "env": Each(Fields({"name": TEXT, "value": TEXT})),
        "volumes": Fields(
            {"keda": Fields({"extraVolumes": CHECKED_ELSEWHERE, "extraVolumeMounts": CHECKED_ELSEWHERE})}
        ),
    }
)
"""The values of KEDA's chart."""


def scaled_object(spec: Manifest) -> Iterator[str]:
    if not 0 < spec["minReplicaCount"] <= spec["maxReplicaCount"]:
        yield "replicas"
    for rules in spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"].values():
        if not 0 <= rules["stabilizationWindowSeconds"] <= 3600:
            yield "stabilizationWindowSeconds"
        if not all(0 < policy["periodSeconds"] <= 1800 for policy in rules["policies"]):
            yield "periodSeconds"


def prometheus_rule(spec: Manifest) -> Iterator[str]:
    names = [group["name"] for group in spec["groups"]]
    if len(set(names)) < len(names):
        yield "names of groups"


def postgres_cluster(spec: Manifest) -> Iterator[str]:
    if not 0 < spec["postgresql"]["synchronous"]["number"] < spec["instances"]:
        yield "number"


SPECS: dict[tuple[str, str], Shape] = {
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("keda.sh/v1alpha1", "TriggerAuthentication"): TRIGGER_AUTHENTICATION,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("postgresql.cnpg.io/v1", "Cluster"): POSTGRES_CLUSTER,
}
RULES: dict[str, Callable[[Manifest], Iterator[str]]] = {
    "ScaledObject": scaled_object,
    "PrometheusRule": prometheus_rule,
    "Cluster": postgres_cluster,
}
"""What the parts of a resource ask of each other."""

METADATA = Fields({"name": NAME}, {"namespace": NAME, "labels": Keyed(TEXT)})


def shape_of(manifest: Manifest) -> Shape | None:
    """The shape of a custom resource; None for Kubernetes' own."""
    spec = SPECS.get((manifest["apiVersion"], manifest["kind"]))
    return spec and Fields({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": spec})


def check(manifest: Manifest, shape: Shape) -> None:
    """Refuse a custom resource that its operator would not take."""
    kind = manifest["kind"]
    found = list(shape.faults(manifest, kind))
    if not found and kind in RULES:
        found = list(RULES[kind](manifest["spec"]))
    assert not found, found
