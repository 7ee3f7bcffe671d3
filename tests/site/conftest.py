"""The site, built once; and what a page's code needs to run."""

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from jsworker import Settings, load_settings
from tests.support.servers import TestServers

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, servers: TestServers, database_url: str) -> Settings:
    """Settings in the environment, as a reader has them."""
    name = f"site-{secrets.token_hex(4)}"
    values = {"DATABASE_URL": database_url, "NATS_URL": servers.nats.url, "STATEMENT_TIMEOUT": "4.9"}
    for variable, value in {**values, "STREAM": name, "SUBJECT_PREFIX": name}.items():
        monkeypatch.setenv(f"JSWORKER_{variable}", value)
    return load_settings()
