"""All nemeses by name."""

from tests.faults.battlefield import Nemesis
from tests.faults.nemeses import jobs, messages, nats_server, network, postgres, processes, storage

KILLS: dict[str, Nemesis] = processes.KILLS
"""Those of the kill phase, which come every 1.2 seconds."""

OTHERS: dict[str, Nemesis] = {
    **processes.OTHERS,
    **jobs.NEMESES,
    **nats_server.NEMESES,
    **postgres.NEMESES,
    **network.NEMESES,
    **messages.NEMESES,
    **storage.NEMESES,
}
"""Those that come one after another."""

CLUSTER: dict[str, Nemesis] = nats_server.CLUSTER
"""Those that need three nats-servers."""

FAULTS_OF: dict[str, tuple[str, ...]] = {
    "killed_at_points": tuple(f"killed_{point}" for point in processes.POINTS),
    "rolling_restart": ("sigterm",),
}
"""What those log that do several things; all others log their own name."""
