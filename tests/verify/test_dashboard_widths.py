"""The dashboard with long texts without a space, on a phone and on a desktop. Run by ``make verify``.

Needs Debian's packages chromium and chromium-driver; nothing is downloaded.
"""

import secrets
from collections.abc import Iterator

import pytest

from jsworker import Cron
from tests.dashboard.shop import Shop, open_shop
from tests.support.servers import TEMPLATE, TestServers, copy_database, drop_database
from tests.verify.browser import DESKTOP, Browser, open_browser

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

PHONE = (375, 812)
LONG = "W" * 200
KIND = "w" * 64
# LONG and KIND stand for the texts above.
ROWS = """
INSERT INTO jsworker.jobs (
  id, kind, payload, unique_key, limit_key, clear_reason, last_error, stage, message, status, run_at, held_by,
  held_at, queued_at, dispatch, worker_id, fencing_token, attempts, errors, claimed_at, started_at,
  last_activity_at, progress, finished_at, failure_reason)
SELECT uuidv7(), 'KIND', '{"LONG": "LONG"}', name || 'LONG', 'LONG', 'LONG', 'LONG', 'LONG', 'LONG', status,
  CASE name WHEN 'scheduled' THEN now() + interval '1 hour' END,
  CASE name WHEN 'held' THEN 'limit' END, CASE name WHEN 'held' THEN now() END, now(), 1,
  CASE WHEN runs THEN 'LONG' END, runs::int, (runs OR ended)::int, ended::int,
  CASE WHEN runs OR ended THEN now() END, now(), CASE WHEN runs THEN now() END, 0.5,
  CASE WHEN ended THEN now() END, CASE WHEN ended THEN 'LONG' END
FROM (VALUES ('queued', 'queued', false, false), ('scheduled', 'scheduled', false, false),
  ('held', 'scheduled', false, false), ('processing', 'processing', true, false),
  ('failed', 'failed', false, true)) AS each(name, status, runs, ended);

INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token)
SELECT id, 'LONG', '"LONG"', 1 FROM jsworker.jobs;

INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error, detail)
SELECT id, event, 'LONG', 1, 'LONG', '{"LONG": "LONG"}'
FROM jsworker.jobs, unnest(ARRAY['claimed', 'rejected', 'errored']) AS event;

INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state)
SELECT name, 'LONG', 4194304, ARRAY['KIND'], 1000000, name, '1 day', 'running'
FROM unnest(ARRAY['LONG', 'other']) AS name;

INSERT INTO jsworker.limits (kind, key, max_running, paused_at, paused_by, reason, set_by)
SELECT 'KIND', key, 1000000, now(), 'LONG', 'LONG', 'operator' FROM unnest(ARRAY['LONG', '']) AS key;

INSERT INTO jsworker.dead_messages (subject, stream_seq, reason, data, truncated)
VALUES ('LONG', 9007199254740991, 'LONG', '', true);
"""
# Elements in which something is too wide, without being ones that scroll.
TOO_WIDE = """
const inside = "main, main > *, .card, .figures li, .question, .acts, .tabs, .facts dd, details, .top";
return [...document.querySelectorAll(inside)].filter((each) =>
  each.clientWidth && each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX === "visible"
).map((each) => `${each.tagName}.${each.className}: ${each.scrollWidth} in ${each.clientWidth}`);
"""


@pytest.fixture(scope="module")
def shop(servers: TestServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop without workers."""
    name = f"test_{secrets.token_hex(6)}"
    url = copy_database(servers.postgres, name, TEMPLATE)
    with open_shop(url, servers.nats.url, tmp_path_factory.mktemp("shop"), "widths") as opened:
        yield opened
    drop_database(servers.postgres, name)


def fill(shop: Shop) -> list[str]:
    """Write the rows, and return the addresses of the pages that show them."""
    for statement in ROWS.replace("LONG", LONG).replace("KIND", KIND).split(";\n"):
        shop.rows(statement)
    jobs = dict(
        shop.rows("SELECT CASE held_by WHEN 'limit' THEN 'held' ELSE status END, id FROM jsworker.jobs")
    )
    with shop.client.workflow(LONG) as flow:
        node = flow.job(KIND, {}, name=LONG)
        flow.job(KIND, {}, name=f"X{LONG}", after=node)
    shop.client.schedules.add(LONG[:100], KIND, Cron("0 3 * * *", tz="America/Argentina/ComodRivadavia"))
    shop.client.drain_worker("other", actor=LONG)
    of_key = f"kind={KIND}&key={LONG}"
    return [
        *(
            "/",
            "/jobs",
            f"/jobs?worker={LONG}&key={LONG}",
            "/failures",
            f"/failures?kind={KIND}",
            "/kinds",
            "/keys",
        ),
        *("/keys", "/schedules", "/workflows", "/workers", "/dead-messages", "/doctor?examine=yes", "/audit"),
        *(f"/jobs/{job_id}" for job_id in jobs.values()),
        *(f"/jobs/{jobs['processing']}/{page}" for page in ("stack", "clear", "cancel")),
        *(
            f"/jobs/retry?all=yes&status=failed&key={LONG}",
            f"/workflows/{flow.id}",
            f"/workers/drain?worker={LONG}",
        ),
        *(f"/workers/stack?worker={LONG}", f"/kinds/pause?{of_key}", f"/kinds/set-limits?{of_key}"),
        *(
            f"/schedules/run-now?name={LONG[:100]}",
            f"/enqueue?kind={KIND}",
            f"/nothing/{LONG}",
            f"/jobs?since={LONG}",
        ),
    ]


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_page_is_wider_than_the_window(
    shop: Shop, pages: list[str], browser: Browser, size: tuple[int, int]
) -> None:
    browser.look("light", size)
    found = []
    for path in pages:
        browser.open(path)
        browser.run("for (const each of document.querySelectorAll('main details')) each.open = true")
        width = browser.run("return document.documentElement.scrollWidth")
        if (wide := browser.run(TOO_WIDE)) or width != size[0]:
            found.append(f"{path.replace(LONG, 'W…')}: {width}; {', '.join(wide)}")
    assert found == [], "\n".join(found)


def test_long_names_leave_the_other_columns_in_sight(shop: Shop, pages: list[str], browser: Browser) -> None:
    browser.look("light", DESKTOP)
    workflow = next(path for path in pages if path.startswith("/workflows/"))
    with_steps = next(path for path in pages if path.startswith("/jobs/"))
    beyond = """return [...document.querySelectorAll('.scroll')].map((each) =>
      `${each.ariaLabel} ${each.scrollWidth - each.clientWidth}`).filter((each) => !each.endsWith(" 0"))"""
    for path in ("/workflows", workflow, with_steps, "/workers"):
        browser.open(path)
        assert (path, browser.run(beyond)) == (path, [])


@pytest.fixture(scope="module")
def pages(shop: Shop) -> list[str]:
    return fill(shop)


@pytest.fixture(scope="module")
def browser(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(shop.address, tmp_path_factory.mktemp("browser")) as opened:
        yield opened
