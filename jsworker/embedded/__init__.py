"""A real nats-server and a real PostgreSQL on free loopback ports, for development, examples and tests.

``EmbeddedServers`` is public: ``with EmbeddedServers(folder) as servers`` runs both for the length of a
block, as ``jsworker dev`` does; ``servers.environment()`` returns the settings with which to connect to them.
"""

from jsworker.embedded.child_processes import start_with_parent
from jsworker.embedded.postgres import EmbeddedPostgres
from jsworker.embedded.server import EmbeddedNats
from jsworker.embedded.servers import EmbeddedServers

__all__ = ["EmbeddedNats", "EmbeddedPostgres", "EmbeddedServers", "start_with_parent"]
