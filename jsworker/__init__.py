"""jsworker: jobs that must not get lost. NATS JetStream delivers, PostgreSQL decides who owns each job."""

from importlib.metadata import version

__version__ = version("jsworker")
