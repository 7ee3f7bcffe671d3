"""docs/fastapi.md: its application works."""

from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from fastapi import FastAPI

from jsworker import Job, JobClient, JobProcessor, Worker
from jsworker.contrib.fastapi import Client
from jsworker.core.settings import Settings
from tests.support.documents import Page

PAGE = Page("docs/fastapi.md")


class CountWords(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> int:
        return len(job.payload["text"].split())


@pytest.fixture
def names(environment: None) -> dict[str, Any]:
    """What the code of the page defines, with the servers of the test."""
    return PAGE.names()


@pytest.mark.parametrize("lifespan", ["jobs_lifespan", "lifespan"])
async def test_its_routes_enqueue_and_wait(settings: Settings, names: dict[str, Any], lifespan: str) -> None:
    app: FastAPI = names["app"]
    app.router.lifespan_context = names[lifespan]
    async with names["calling"](app) as http, Worker([CountWords], settings):
        placed = await http.post("/words", params={"text": "to be or not"})
        assert placed.status_code == 202
        assert (await http.get(f"/words/{placed.json()['job']}")).json() == 4


async def test_its_route_says_why_there_is_no_result(
    settings: Settings, names: dict[str, Any], client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with names["calling"](names["app"]) as http:
        failing, waiting = [await client.enqueue("count-words", {}, max_attempts=1) for _ in range(2)]
        with monkeypatch.context() as hurried:
            result = JobClient.result
            hurried.setattr(JobClient, "result", lambda own, job, timeout: result(own, job, timeout / 300))
            late = await http.get(f"/words/{waiting.id}")
        await client.cancel(waiting.id)
        async with Worker([CountWords], settings):
            ids = failing.id, waiting.id, uuid4()
            answers = [late, *[await http.get(f"/words/{each}") for each in ids]]
    assert [each.status_code for each in answers] == [504, 409, 409, 404]
    details = [each.json()["detail"] for each in answers]
    assert "KeyError" in details[1]
    assert "cancelled" in details[2]
    assert [details[0], details[3]] == ["the job has not ended yet: ask again", "no such job"]


async def test_a_route_of_an_application_without_a_client_says_what_is_missing() -> None:
    app = FastAPI()

    @app.get("/")
    async def route(client: Client) -> None:
        raise AssertionError(client)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        with pytest.raises(RuntimeError, match=r"FastAPI\(lifespan=jobs_lifespan\)"):
            await http.get("/")


async def test_a_mounted_application_shares_the_client_of_the_outer_one(names: dict[str, Any]) -> None:
    api: FastAPI = names["api"]

    @api.post("/words")
    async def count(client: Client) -> str:
        return str((await client.enqueue("count-words", {"text": "to be"})).id)

    async with names["calling"](names["app"]) as http:
        placed = await http.post("/api/words")
    assert placed.status_code == 200
    assert UUID(placed.json())


async def test_a_mounted_application_without_the_state_says_what_to_do(names: dict[str, Any]) -> None:
    alone = FastAPI()

    @alone.get("/")
    async def route(client: Client) -> None:
        raise AssertionError(client)

    names["app"].mount("/alone", alone)
    async with names["calling"](names["app"]) as http:
        with pytest.raises(RuntimeError, match=r"mounted\.state = outer\.state"):
            await http.get("/alone/")
