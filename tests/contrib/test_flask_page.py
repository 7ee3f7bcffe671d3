"""docs/flask.md: its application works."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from flask import Flask
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from jsworker import Job, JobClient, JobProcessor, SyncJobClient, Worker
from jsworker.contrib.flask import FlaskJobs
from jsworker.core.errors import SettingsError
from jsworker.core.settings import Settings
from tests.support.documents import Page
from tests.support.polling import eventually
from tests.worker.rows import Rows

PAGE = Page("docs/flask.md")


class CountWords(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> int:
        return len(job.payload["text"].split())


@pytest.fixture
def names() -> dict[str, Any]:
    return PAGE.names()


@pytest.fixture
def app(settings: Settings, names: dict[str, Any]) -> Iterator[Flask]:
    given = {name: getattr(settings, name) for name in ("nats_url", "stream", "subject_prefix")}
    given["database_url"] = settings.database_dsn()
    made: Flask = names["create_app"](**{f"JSWORKER_{name.upper()}": value for name, value in given.items()})
    yield made
    made.extensions["jsworker"].close()


async def test_its_routes_enqueue_and_wait(app: Flask, settings: Settings) -> None:
    def calls() -> Any:
        placed = app.test_client().post("/words", data={"text": "to be or not"})
        assert placed.status_code == 202
        return app.test_client().get(f"/words/{placed.json['job']}").json  # type: ignore[index]  # it is JSON

    async with Worker([CountWords], settings):
        found = await asyncio.gather(*(asyncio.to_thread(calls) for _ in range(3)))
    assert found == [{"result": 4}] * 3


async def test_its_route_says_why_there_is_no_result(
    app: Flask, settings: Settings, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(job_id: Any) -> Any:
        return await asyncio.to_thread(app.test_client().get, f"/words/{job_id}")

    failing, waiting = [await client.enqueue("count-words", {}, max_attempts=1) for _ in range(2)]
    with monkeypatch.context() as hurried:
        result = SyncJobClient.result
        hurried.setattr(SyncJobClient, "result", lambda own, job, timeout: result(own, job, timeout / 300))
        late = await answer(waiting.id)
    await client.cancel(waiting.id)
    async with Worker([CountWords], settings):
        answers = [late, *[await answer(each) for each in (failing.id, waiting.id, uuid4())]]
    assert [each.status_code for each in answers] == [504, 409, 409, 404]
    errors = [each.json["error"] for each in answers]
    assert "KeyError" in errors[1]
    assert "cancelled" in errors[2]
    assert [errors[0], errors[3]] == ["the job has not ended yet: ask again", "no such job"]


async def test_a_job_is_enqueued_with_a_row_of_ones_own(
    app: Flask, settings: Settings, rows: Rows, names: dict[str, Any]
) -> None:
    await rows.query("CREATE TABLE orders (number int PRIMARY KEY)")
    engine = create_engine(settings.database_dsn().replace("postgresql://", "postgresql+psycopg://"))

    def place() -> str:
        with app.app_context(), Session(engine) as session:
            placed: str = names["place_order"](session, 7)
            return placed

    job = await asyncio.to_thread(place)
    engine.dispose()

    async def published() -> None:
        [row] = await rows.query("SELECT id, needs_publish FROM jsworker.jobs")
        assert (str(row["id"]), row["needs_publish"]) == (job, False)

    await eventually(published)


async def test_one_client_for_a_process_until_somebody_asks(app: Flask) -> None:
    def client_of() -> Any:
        with app.app_context():
            return FlaskJobs().client

    first, second = client_of(), await asyncio.to_thread(client_of)
    assert first is second
    assert not [each for each in threading.enumerate() if each.name.startswith("jsworker client")]


def test_what_is_missing_is_told() -> None:
    app = Flask("app")
    with app.app_context(), pytest.raises(RuntimeError, match=r"FlaskJobs\(app\)"):
        _ = FlaskJobs().client
    with pytest.raises(SettingsError, match="JSWORKER_DATABASE_URL must be set"):
        FlaskJobs(app)


@pytest.mark.parametrize("variable", ["JSWORKER_DATABASE_URL_FILE", "JSWORKER_DATABASE_PASSWORD_FILE"])
def test_the_path_of_a_file_is_no_configuration(variable: str) -> None:
    app = Flask("app")
    app.config.update({"JSWORKER_DATABASE_URL": "postgresql://host/jobs", variable: "/run/secrets/it"})
    with pytest.raises(SettingsError, match=f"^{variable} is read from the environment only$"):
        FlaskJobs(app)
