"""The facts that are stored with figures: the machine, versions, and PostgreSQL's durability settings."""

import asyncio
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import nats
import psycopg

from benchmarks.servers import running_servers

_PACKAGES = (
    "jsworker",
    "pgqueuer",
    "awa-pg",
    "procrastinate",
    "taskiq-nats",
    "faststream",
    "nats-py",
    "psycopg",
    "asyncpg",
    "sqlalchemy",
    "uvloop",
)


def gather() -> dict[str, Any]:
    """Return machine, Python, versions and durability; both servers are started to ask them."""
    with running_servers() as servers:
        with psycopg.connect(servers.postgres.url) as connection:
            postgres = _setting(connection, "server_version")
            durability = {
                name: _setting(connection, name)
                for name in ("fsync", "synchronous_commit", "full_page_writes")
            }
        nats_server = asyncio.run(_nats_version(servers.nats.url))
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {"PostgreSQL": postgres, "nats-server": nats_server} | _packages(),
        "postgresql_settings": durability,
    }


def machine() -> dict[str, Any]:
    """Return processors and memory."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "cpu_model": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _packages() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _setting(connection: psycopg.Connection, name: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    return str(row[0]) if row else "unknown"


async def _nats_version(url: str) -> str:
    connection = await nats.connect(url)
    try:
        version = connection.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"
    finally:
        await connection.close()
