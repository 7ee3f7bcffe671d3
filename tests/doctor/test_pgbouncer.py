"""Each mode of a real PgBouncer, as doctor sees it. Needs the program (Debian package: pgbouncer)."""

from collections.abc import Iterator

import pytest

from benchmarks.measures import pgbouncer
from benchmarks.servers import Servers, running_servers
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from jsworker.doctor.checks import examine
from jsworker.doctor.gather import gather
from jsworker.embedded.resources import free_port
from jsworker.ownership.database import Database

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def durable() -> Iterator[Servers]:
    with running_servers() as servers:
        yield servers


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("transaction", ("postgresql.pooler", "ok", "a pooler in transaction mode")),
        ("session", ("postgresql.pooler", "info", "a pooler is between")),
        ("statement", ("postgresql.pooler", "error", "a pooler in statement mode")),
    ],
)
async def test_modes(
    mode: str, expected: tuple[str, str, str], durable: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, level, part = expected
    written = pgbouncer._configuration

    def in_mode(*arguments: object) -> str:
        return written(*arguments).replace("pool_mode = transaction", f"pool_mode = {mode}")  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(pgbouncer, "_configuration", in_mode)
    variables = durable.new_jsworker()
    with pgbouncer.running_pgbouncer(pgbouncer.find_pgbouncer(), durable) as port:
        url = pgbouncer.through(port, variables["JSWORKER_DATABASE_URL"])
        settings = Settings(database_url=url, nats_url=durable.nats.url, stream=variables["JSWORKER_STREAM"])
        found = examine(await gather(settings))
    [finding] = [each for each in found if each.check == check]
    assert finding.level == level
    assert part in finding.says


async def test_a_pooler_without_its_server_refuses_no_login(
    durable: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = pgbouncer._configuration

    def without_server(*arguments: object) -> str:
        configuration = written(*arguments)  # type: ignore[arg-type]  # passed on
        nobody = configuration.replace(f"port={durable.postgres.port}\n", f"port={free_port()}\n")
        assert nobody != configuration
        return f"{nobody}query_wait_timeout = 1\n"

    monkeypatch.setattr(pgbouncer, "_configuration", without_server)
    variables = durable.new_jsworker()
    with pgbouncer.running_pgbouncer(pgbouncer.find_pgbouncer(), durable) as port:
        url = pgbouncer.through(port, variables["JSWORKER_DATABASE_URL"])
        async with Database(url, statement_timeout=30.0) as database:
            with pytest.raises(DatabaseUnavailable):
                await database.ping()
