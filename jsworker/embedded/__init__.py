"""A real nats-server and a real PostgreSQL on free loopback ports, for development, the demo and tests."""

from jsworker.embedded.child_processes import start_with_parent
from jsworker.embedded.nats import EmbeddedNats
from jsworker.embedded.postgres import EmbeddedPostgres
from jsworker.embedded.servers import EmbeddedServers

__all__ = ["EmbeddedNats", "EmbeddedPostgres", "EmbeddedServers", "start_with_parent"]
