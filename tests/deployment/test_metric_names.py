"""What alerts and dashboard may ask for is what a real ``jsworker run`` shows, by name and by label."""

from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jsworker import JobClient
from jsworker.telemetry.metrics import Metrics
from tests.deployment.metric_names import FROM_PROMETHEUS, LABELS, PER_PROCESS
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_http import answers, base_of


async def test_list_of_metrics_is_what_workers_show(supervise: Supervise, client: JobClient) -> None:
    parent = supervise("Nap", processes=2, http_port=0)
    base = await base_of(parent)
    await client.enqueue_many("nap", [{"seconds": 0}] * 10)
    words = ("jsworker_queue_drift_jobs{", 'outcome="completed"', "jsworker_dead_messages{")
    text = await answers(f"{base}/metrics", HTTPStatus.OK, *words)
    families = list(text_string_to_metric_families(text))
    names = {
        name
        for family in families
        for name in of_family(family.name, family.type)
        if name.startswith("jsworker_")
    }
    assert names == set(LABELS)
    for family in families:
        for sample in family.samples:
            if sample.name in LABELS:
                assert set(sample.labels) == LABELS[sample.name] - FROM_PROMETHEUS, sample.name


def of_family(name: str, kind: str) -> set[str]:
    """The names of a family's samples, as far as anybody asks for them."""
    return {{"counter": f"{name}_total", "histogram": f"{name}_bucket"}.get(kind, name)}


def test_labels_of_metrics_that_seldom_have_a_sample() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    counted = {name: made for name, made in registry._names_to_collectors.items() if name in PER_PROCESS}
    assert "jsworker_stalls_total" in counted
    for name, made in counted.items():
        assert set(getattr(made, "_labelnames")) == PER_PROCESS[name] - {"le"}, name  # noqa: B009 -- not typed
