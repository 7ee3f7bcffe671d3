"""Take pictures of all pages with Debian's Chromium, of a shop whose workers run and are killed.

``python -m tests.dashboard.capture_pages FOLDER [--docs]`` writes them into a folder, light and dark, desktop
and phone; ``--docs`` also writes those of docs/dashboard.md.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from uuid import UUID

from jsworker.ownership.upgrading import upgrade_database
from tests.dashboard.shop import Shop, open_shop, wait_for
from tests.support.servers import new_servers_folder, start_test_servers
from tests.verify.browser import DESKTOP, PHONE, Browser, open_browser

DOCS = Path(__file__).parents[2] / "docs"

# The last hour from what was measured just now: each minute a little more or less of it.
HISTORY = """
INSERT INTO jsworker.statistics
SELECT date_trunc('minute', clock_timestamp()) - make_interval(mins => ago), kind,
  started * f / 100, completed * f / 100, errors * f / 100, failed * (ago %% 11 = 3)::int, cancelled, expired,
  wait_seconds * f / 100, run_seconds * f / 100,
  (SELECT array_agg(each * f / 100 ORDER BY place) FROM unnest(waits) WITH ORDINALITY AS u(each, place)),
  (SELECT array_agg(each * f / 100 ORDER BY place) FROM unnest(runs) WITH ORDINALITY AS u(each, place))
FROM (SELECT DISTINCT ON (kind) * FROM jsworker.statistics ORDER BY kind, started DESC) AS measured,
  generate_series(1, 59) AS ago, LATERAL (SELECT 60 + (ago * 37 %% 71) + (30 - abs(30 - ago)) AS f) AS factor
ON CONFLICT DO NOTHING
"""


def fill(shop: Shop) -> dict[str, str]:
    """Have jobs of every state, and return the addresses of pages by the names of their pictures."""
    workers = shop.start("run", "--processes", "2", "--concurrency", "6")
    wait_for(lambda: len(workers.lines("child.started")) == 2, lambda: workers.log)
    killed = shop.enqueue("encode-video", {"file": "holidays.mov", "seconds": 6})
    for number in range(1, 120):
        shop.enqueue("send-invoice", {"number": number})
    for number in range(1, 13):
        shop.enqueue("charge-card", {"number": number})
    for tenant in ("acme", "acme", "acme", "globex", "globex", "initech"):
        shop.enqueue("sync-tenant", {"tenant": tenant, "seconds": 600}, limit_key=tenant)
    done, broken = shop.nightly_import(is_broken=False), shop.nightly_import(is_broken=True)
    time.sleep(3)
    shop.kill_owner(killed)
    shop.wait_until(killed, "completed")
    for number in range(200, 260):
        shop.enqueue("send-invoice", {"number": number, "customer": "ben"})
    running = shop.enqueue("encode-video", {"file": "wedding.mov", "seconds": 9, "first_seconds": 240})
    shop.enqueue("encode-video", {"file": "birthday.mov", "seconds": 9, "first_seconds": 90}, priority="high")
    waiting = shop.enqueue("send-invoice", {"number": 900}, delay=5400, unique_key="order:900")
    shop.client.cancel(shop.enqueue("send-invoice", {"number": 901}, delay=600), actor="ann")
    shop.client.pause("publish-catalogue", reason="the catalogue is being moved", actor="ann")
    for number in range(3):
        shop.enqueue("publish-catalogue", {"number": number})
    shop.client.schedules.run_now("nightly-report", actor="ben")
    failed = shop.value(
        "SELECT id FROM jsworker.jobs WHERE status = 'failed' AND kind = 'charge-card' LIMIT 1"
    )
    shop.add_dead_messages(3)
    shop.wait_until(running, "processing")
    time.sleep(4)
    wait_for(lambda: shop.value("SELECT count(*) FROM jsworker.statistics"), lambda: "no statistics")
    shop.rows(HISTORY)
    return {
        "overview": "/",
        "jobs": "/jobs",
        "jobs-running": "/jobs?status=processing",
        "jobs-filtered": "/jobs?kind=charge-card&status=failed",
        "job-killed": f"/jobs/{killed}",
        "job-running": f"/jobs/{running}",
        "job-waiting": f"/jobs/{waiting}",
        "job-failed": f"/jobs/{failed}",
        "job-stack": f"/jobs/{running}/stack",
        **{f"question-{verb}": f"/jobs/{job}/{verb}" for verb, job in questions(running, waiting, failed)},
        "enqueue": "/enqueue",
        "enqueue-form": "/enqueue?kind=send-invoice",
        "failures": "/failures",
        "kinds": "/kinds",
        "question-pause": "/kinds/pause?kind=send-invoice",
        "question-limits": "/kinds/set-limits?kind=send-invoice",
        "keys": "/keys",
        "schedules": "/schedules",
        "workflows": "/workflows",
        "workflow-done": f"/workflows/{done}",
        "workflow-broken": f"/workflows/{broken}",
        "workers": "/workers",
        "dead-messages": "/dead-messages",
        "doctor": "/doctor",
        "doctor-examined": "/doctor?examine=yes",
        "question-all": "/jobs/retry?all=yes&kind=charge-card&status=failed",
        "audit": "/audit",
        "error": f"/jobs/{UUID(int=1)}",
    }


def questions(running: UUID, waiting: UUID, failed: UUID) -> list[tuple[str, UUID]]:
    return [("clear", running), ("priority", waiting), ("reschedule", waiting), ("retry", failed)]


def capture(browser: Browser, pages: dict[str, str], folder: Path) -> None:
    for size_name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            browser.look(scheme, size)
            for name, path in pages.items():
                browser.open(path)
                browser.picture(folder / f"{name}-{size_name}-{scheme}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    servers = start_test_servers(new_servers_folder())
    work = Path(tempfile.mkdtemp())
    try:
        url = servers.postgres.create_database("shop")
        upgrade_database(url)
        with open_shop(url, servers.nats.url, work) as shop:
            pages = fill(shop)
            with open_browser(shop.address, work) as browser:
                if given.docs:
                    for name, page, height in (("dashboard", "overview", 960), ("job", "job-killed", 750)):
                        browser.look("light", (1280, height))
                        browser.open(pages[page])
                        browser.picture(DOCS / f"{name}.png", whole=False)
                capture(browser, pages, given.folder)
    finally:
        servers.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
