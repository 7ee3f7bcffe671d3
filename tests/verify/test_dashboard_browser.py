"""The dashboard in a real browser, while workers run jobs and are killed. Run by ``make verify``.

Needs Debian's packages chromium and chromium-driver; nothing is downloaded.
"""

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import ClassVar
from uuid import UUID

import psycopg
import pytest

from jsworker import Limit
from tests.dashboard.shop import Shop, open_shop, wait_for
from tests.support.servers import TEMPLATE, TestServers, copy_database, drop_database
from tests.verify.browser import DESKTOP, PHONE, Browser, open_browser
from tests.verify.webdriver import ENTER, TAB

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

PAGES = [
    *("/", "/jobs", "/failures", "/kinds", "/keys", "/schedules", "/workflows", "/workers", "/dead-messages"),
    *("/doctor", "/audit", "/enqueue", "/enqueue?kind=send-invoice", "/enqueue?kind=unknown"),
    *("/jobs?status=failed&kind=charge-card", "/kinds/pause?kind=send-invoice"),
    *("/kinds/set-limits?kind=send-invoice", "/schedules/run-now?name=clean-up"),
]
LATER = 86_400.0
# By one command: of elements that are asked one after another some may be replaced meanwhile, in a live part.
LISTED = "return [...document.querySelectorAll('input[name=id]')].map((each) => each.value)"
FOCUSED = "return document.activeElement.textContent.trim()"


@pytest.fixture(scope="module")
def shop(servers: TestServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop whose two workers run until the last test."""
    name = f"test_{secrets.token_hex(6)}"
    url = copy_database(servers.postgres, name, TEMPLATE)
    with open_shop(url, servers.nats.url, tmp_path_factory.mktemp("shop")) as opened:
        opened.start("run", "--processes", "2", "--concurrency", "4")
        yield opened
    drop_database(servers.postgres, name)


@pytest.fixture(scope="module")
def driven(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(shop.address, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(driven: Browser) -> Iterator[Browser]:
    """A browser at its start; after the test its console holds no complaint."""
    driven.set_scripts(are_run=True)
    driven.look("light", DESKTOP)
    yield driven
    assert driven.complaints() == []


@pytest.fixture(scope="module")
def killed(shop: Shop) -> UUID:
    """A job whose first run was killed with its process, and whose second one completed it."""
    job_id = shop.enqueue("encode-video", {"file": "holidays.mov", "seconds": 1})
    shop.kill_owner(job_id)
    shop.wait_until(job_id, "completed")
    return job_id


@pytest.fixture(scope="module")
def pages(shop: Shop, killed: UUID) -> list[str]:
    """The addresses of all pages, on which something stands."""
    failed = shop.enqueue("charge-card", {"number": 3})
    shop.wait_until(failed, "failed")
    waiting = shop.enqueue("send-invoice", {"number": 1}, delay=LATER)
    running = shop.enqueue("encode-video", {"file": "wedding.mov"})
    shop.enqueue("sync-tenant", {"tenant": "acme", "seconds": 3600}, limit_key="acme")
    shop.enqueue("sync-tenant", {"tenant": "acme", "seconds": 3600}, limit_key="acme")
    workflow = shop.nightly_import(is_broken=True)
    shop.add_dead_messages(2)
    shop.client.limits.set("publish-catalogue", Limit(5), actor="ann")
    shop.client.pause("publish-catalogue", actor="ann", reason="moved")
    shop.wait_until(running, "processing")
    wait_for(
        lambda: shop.value("SELECT count(*) FROM jsworker.workflows WHERE finished_at IS NOT NULL"),
        lambda: "",
    )
    jobs = [f"/jobs/{job}" for job in (killed, failed, waiting, running)]
    questions = [f"/jobs/{job}/{verb}" for job, verb in ((running, "clear"), (waiting, "reschedule"))]
    return [*PAGES, *jobs, *questions, f"/jobs/{running}/stack", f"/workflows/{workflow}"]


def test_every_page_opens_without_a_complaint(browser: Browser, pages: list[str]) -> None:
    for path in pages:
        browser.open(path)
        assert browser.count("main h1") == 1, path
        assert browser.complaints() == [], path
        assert browser.run("return typeof htmx") == "object"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, pages: list[str], scheme: str) -> None:
    browser.look(scheme, DESKTOP)
    found = {}
    for path in pages:
        browser.open(path)
        browser.run("for (const each of document.querySelectorAll('main details')) each.open = true")
        found[path] = browser.violations()
    assert {path: each for path, each in found.items() if each} == {}


def test_on_a_phone_no_page_is_wider_than_it(browser: Browser, pages: list[str]) -> None:
    browser.look("light", PHONE)
    for path in pages:
        browser.open(path)
        width = browser.run("return document.documentElement.scrollWidth")
        assert (path, width) == (path, PHONE[0])
    browser.look("light", DESKTOP)


def test_what_the_doctor_found_fits_a_phone(browser: Browser, shop: Shop) -> None:
    browser.look("light", PHONE)
    browser.open("/doctor?examine=yes")
    browser.shows("NATS")
    beside = "each => each.scrollWidth - each.clientWidth"
    assert set(browser.run(f"return [...document.querySelectorAll('.scroll')].map({beside})")) == {0}


def test_the_figures_of_the_overview_fill_their_rows(browser: Browser, shop: Shop) -> None:
    browser.look("light", (1100, 800))
    browser.open("/")
    tops = browser.run("return [...document.querySelectorAll('.figures li')].map(each => each.offsetTop)")
    assert [tops.count(top) for top in sorted(set(tops))] == [4, 4]


def test_a_name_from_right_to_left_leaves_the_id_behind_it_whole(browser: Browser, killed: UUID) -> None:
    browser.open(f"/jobs/{killed}")
    browser.run("document.querySelector('h1').firstChild.data = '\u05d9\u05d9\u05d1\u05d5\u05d0 '")
    pieces = """
        const id = document.createRange();
        id.selectNodeContents(document.querySelector('h1 small'));
        return id.getClientRects().length;
    """
    assert browser.run(pieces) == 1


def test_a_long_payload_is_printed_to_its_end(browser: Browser, shop: Shop) -> None:
    job_id = shop.enqueue("send-invoice", {"lines": list(range(200))}, delay=LATER)
    browser.open(f"/jobs/{job_id}")
    hidden = "const pre = document.querySelector('main pre'); return pre.scrollHeight - pre.clientHeight"
    assert browser.run(hidden) > 0
    browser.driver.devtools("Emulation.setEmulatedMedia", media="print")
    assert browser.run(hidden) == 0
    browser.driver.devtools("Emulation.setEmulatedMedia", media="")


def test_the_overview_changes_without_being_loaded_again(browser: Browser, shop: Shop) -> None:
    browser.open("/")
    browser.run("window.stillTheSame = true")
    shop.enqueue("report-of-nobody", {})
    browser.shows("report-of-nobody")
    assert browser.run("return window.stillTheSame") is True


class Refusing(BaseHTTPRequestHandler):
    """A proxy whose server is away."""

    times: ClassVar[list[float]] = []

    def do_GET(self) -> None:
        self.times.append(time.monotonic())
        self.send_error(502)

    def log_message(self, *_: object) -> None:
        pass


class Relay(ThreadingTCPServer):
    """Passes connections on to a port; those that are stalled stay open, and nothing comes through."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), RelayedConnection)
        self.port = self.server_address[1]
        self.target = port
        self.stalled: set[socket.socket] = set()
        self.open: set[socket.socket] = set()

    def stall(self) -> None:
        self.stalled |= self.open


class RelayedConnection(BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Relay)
        self.relay = self.server
        self.relay.open.add(self.request)
        with socket.create_connection(("127.0.0.1", self.relay.target)) as there:
            threading.Thread(target=self.pump, args=(there, self.request), daemon=True).start()
            self.pump(self.request, there)
        self.relay.open.discard(self.request)

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if self.request not in self.relay.stalled:
                    target.sendall(data)
            if self.request not in self.relay.stalled:
                target.shutdown(socket.SHUT_WR)


@contextmanager
def stalling(port: int) -> Iterator[Relay]:
    with Relay(port) as relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        yield relay
        relay.shutdown()


def test_an_open_page_is_live_again_soon_after_an_outage(browser: Browser, shop: Shop) -> None:
    browser.open("/")
    browser.run("window.stillTheSame = true")
    browser.shows("waiting")
    shop.board.kill_all()
    port = int(shop.address.rpartition(":")[2])
    with ThreadingHTTPServer(("127.0.0.1", port), Refusing) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        wait_for(lambda: len(Refusing.times) >= 8, lambda: str(Refusing.times))
        browser.shows("Not updated since")
        proxy.shutdown()
    assert max(after - before for before, after in pairwise(Refusing.times)) < 20
    shop.open_dashboard(port)
    shop.enqueue("report-of-somebody", {})
    browser.shows("report-of-somebody")
    assert browser.run("return window.stillTheSame") is True
    browser.complaints()  # of each refusal


def test_a_list_stays_while_a_read_fails(browser: Browser, shop: Shop) -> None:
    browser.open("/schedules")
    browser.shows("clean-up")
    browser.run("window.stillTheSame = true")
    with psycopg.connect(shop.settings.database_dsn()) as connection:
        connection.execute("LOCK TABLE jsworker.schedules")
        browser.shows("Not up to date: PostgreSQL took longer than 3 s", "clean-up")
    wait_for(lambda: "Not up to date" not in browser.text, lambda: browser.text)
    assert browser.run("return window.stillTheSame") is True
    assert not browser.run("return document.querySelector('[sse-swap=stale]').offsetHeight")


def test_an_open_page_is_live_again_though_its_connection_died_without_a_word(
    browser: Browser, shop: Shop
) -> None:
    with stalling(int(shop.address.rpartition(":")[2])) as relay:
        browser.driver.ask("POST", "/url", url=f"http://127.0.0.1:{relay.port}/")
        browser.run("window.stillTheSame = true")
        browser.shows("waiting")
        # The server has closed those that loaded the page: what is left is the stream.
        wait_for(lambda: len(relay.open) == 1, lambda: str(relay.open))
        relay.stall()
        shop.enqueue("report-after-a-sleep", {})
        browser.shows("report-after-a-sleep")
        assert browser.run("return window.stillTheSame") is True
        wait_for(lambda: "Not updated" not in browser.text, lambda: browser.text)


def test_a_running_job_is_seen_to_be_killed_and_to_run_again(browser: Browser, shop: Shop) -> None:
    job_id = shop.enqueue("encode-video", {"file": "party.mov", "seconds": 2})
    browser.open(f"/jobs/{job_id}")
    browser.run("window.stillTheSame = true")
    browser.shows("running", "run 1")
    shop.kill_owner(job_id)
    browser.shows("run 2", "taken back: its process is proven dead", "its process ended: signal SIGKILL")
    browser.shows("completed", '"parts": 10')
    assert browser.run("return window.stillTheSame") is True
    assert browser.count("svg.timeline .timeline-handover.timeline-lost") == 1
    assert browser.count("svg.timeline .timeline-run.look-lost, svg.timeline .look-lost .timeline-run") == 1
    browser.press("In words")
    browser.shows("SIGKILL")


def test_what_was_opened_stays_open_while_the_page_changes(browser: Browser, shop: Shop) -> None:
    job_id = shop.enqueue("encode-video", {"file": "garden.mov", "first_seconds": 20})
    browser.open(f"/jobs/{job_id}")
    browser.shows("running", "part 1 of 10")
    browser.press("In words")
    browser.shows("completed", '"parts": 10')
    assert browser.count("details[open]") == 1
    assert browser.run(FOCUSED) == "In words"


def test_a_click_into_a_table_does_not_keep_it_from_changing(browser: Browser, shop: Shop) -> None:
    browser.open("/")
    browser.shows("send-invoice")
    browser.click("main tbody td.number")
    focused = "return document.activeElement.getAttribute('aria-label')"
    assert browser.run(focused) == "Kinds"
    for number in range(3):
        shop.enqueue(f"report-after-a-click-{number}", {})
        browser.shows(f"report-after-a-click-{number}")
        assert browser.run(focused) == "Kinds"


def test_what_was_scrolled_stays_scrolled_while_the_page_changes(browser: Browser, pages: list[str]) -> None:
    browser.look("light", PHONE)
    for path in ("/workers", pages[len(PAGES)]):
        browser.open(path)
        browser.run(
            "const all = document.querySelectorAll('main .scroll, main .timeline-scroll');"
            "window.old = [...all].find((each) => each.scrollWidth > each.clientWidth);"
            "window.old.scrollLeft = 30; window.name = window.old.getAttribute('aria-label')"
        )
        wait_for(lambda: browser.run("return !window.old.isConnected"), lambda: "nothing changes")
        script = 'return document.querySelector(`[aria-label="${window.name}"]`).scrollLeft'
        assert (path, browser.run(script)) == (path, 30)


def test_a_list_in_which_jobs_are_ticked_says_that_it_is_kept(browser: Browser, shop: Shop) -> None:
    first = str(shop.enqueue("report-to-tick", {}))
    browser.open("/jobs?kind=report-to-tick")
    browser.click("input[name=id]")
    second = str(shop.enqueue("report-to-tick", {}))
    browser.shows("Kept as it was at", "boxes are ticked")
    assert browser.run(LISTED) == [first]
    browser.click("input[name=id]")
    wait_for(lambda: browser.run(LISTED) == [second, first], lambda: browser.text)
    wait_for(lambda: "Kept as it was at" not in browser.text, lambda: browser.text)


def fail(shop: Shop, number: int) -> list[UUID]:
    """Have so many jobs failed, and no others of their kind."""
    for job in shop.client.list(status="failed", kind="charge-card"):
        shop.rows("DELETE FROM jsworker.jobs WHERE id = %s", job.id)
    found = [shop.enqueue("charge-card", {"number": 3 * (each + 1)}) for each in range(number)]
    for job_id in found:
        shop.wait_until(job_id, "failed")
    return found


@pytest.mark.parametrize("scripts", ["with", "without"])
def test_retry_of_all_that_failed_and_cancelling_one(browser: Browser, shop: Shop, scripts: str) -> None:
    browser.set_scripts(are_run=scripts == "with")
    failed = fail(shop, 5)
    browser.open("/failures?kind=charge-card")
    browser.shows("is expired")
    browser.press("Retry all")
    browser.shows("Retry 5 jobs?")
    assert shop.status(failed[0]) == "failed"
    browser.press("Retry 5 jobs")
    browser.shows("5 jobs retried")
    again = "SELECT count(*) FROM jsworker.job_events WHERE job_id = ANY(%s) AND event = 'retried'"
    assert shop.value(again, failed) == 5

    waiting = shop.enqueue("send-invoice", {"number": 4}, delay=LATER, unique_key=f"cancel:{scripts}")
    other = shop.enqueue("send-invoice", {"number": 4}, delay=LATER)
    browser.open("/jobs")
    browser.press("Filters")
    browser.type("kind", "send-invoice")
    browser.type("unique_key", f"cancel:{scripts}")
    browser.press("Filter", within="main form.filters")
    wait_for(lambda: "unique_key=cancel" in browser.path, lambda: browser.path)
    assert browser.run(LISTED) == [str(waiting)]
    browser.press("Cancel", within="main form#chosen")
    browser.shows("no job was chosen")
    browser.complaints()  # of its status 400
    browser.press("Back")
    wait_for(lambda: "unique_key=cancel" in browser.path, lambda: browser.path)
    browser.click('input[name="id"]')
    browser.press("Cancel", within="main form#chosen")
    browser.shows("Cancel 1 job?")
    browser.press("Cancel 1 job")
    browser.shows("1 job cancelled")
    assert "unique_key=cancel" in browser.path
    assert (shop.status(waiting), shop.status(other)) == ("cancelled", "scheduled")


def test_back_from_an_action_on_ticked_jobs_leads_to_its_question(browser: Browser, shop: Shop) -> None:
    waiting = shop.enqueue("report-to-cancel", {}, delay=LATER)
    browser.open("/jobs?kind=report-to-cancel")
    browser.click("input[name=id]")
    browser.press("Cancel", within="main form#chosen")
    browser.press("Cancel 1 job")
    browser.shows("1 job cancelled")
    browser.driver.ask("POST", "/back")
    browser.shows("Cancel 1 job?", str(waiting))
    browser.press("Cancel 1 job")
    browser.shows("0 jobs cancelled; 1 left alone", "is cancelled already")


def test_a_double_click_enqueues_one_job(browser: Browser, shop: Shop) -> None:
    count = "SELECT count(*) FROM jsworker.jobs WHERE kind = 'report-of-two-clicks'"
    for number in range(1, 4):
        browser.open("/enqueue?kind=report-of-two-clicks")
        browser.find("main button.primary").double_click()
        browser.shows("is enqueued")
        assert shop.value(count) == number


def test_acting_on_one_job(browser: Browser, shop: Shop) -> None:
    running = shop.enqueue("encode-video", {"file": "long.mov", "seconds": 1})
    shop.wait_until(running, "processing")
    browser.open(f"/jobs/{running}")
    browser.press("Take back")
    browser.shows("Take back 1 job?")
    browser.press("Take back 1 job")  # the browser asks for the reason
    assert shop.status(running) == "processing"
    browser.type("reason", "the disk is full")
    browser.press("Take back 1 job")
    browser.shows("1 job taken back", "the disk is full")
    shop.wait_until(running, "completed")

    waiting = shop.enqueue("send-invoice", {"number": 5}, delay=LATER)
    browser.open(f"/jobs/{waiting}")
    browser.press("Set priority")
    browser.run("document.querySelector('[name=to]').value = 'high'")
    browser.press("Set the priority of 1 job")
    browser.shows("high")
    browser.press("Reschedule")
    when = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(days=2)
    browser.run("document.querySelector('[name=run_at]').value = arguments[0]", f"{when:%Y-%m-%dT%H:%M}")
    browser.press("Reschedule 1 job")
    browser.shows("in 1 d")
    found = shop.rows("SELECT priority, run_at FROM jsworker.jobs WHERE id = %s", waiting)
    assert found == [(0, when)]


def test_kinds_schedules_workflows_and_dead_messages(browser: Browser, shop: Shop) -> None:
    shop.enqueue("import-products", {})
    browser.open("/kinds")
    browser.press("Pause", within="main tr:has(a[href$='kind=import-products'])")
    browser.type("reason", "prices change")
    browser.press("Pause kind import-products")
    browser.shows("prices change")
    held = shop.enqueue("import-products", {})
    browser.press("Resume", within="main tr:has(a[href$='kind=import-products'])")
    browser.press("Resume kind import-products")
    shop.wait_until(held, "completed")

    browser.open("/schedules")
    browser.press("Run now", within="main tr:has(a[href$='kind=nightly-report'])")
    browser.press("Run")
    browser.shows("1 job of schedule nightly-report is enqueued")

    workflow = shop.nightly_import(is_broken=True)
    browser.open(f"/workflows/{workflow}")
    browser.shows("failed", "3 completed, 1 failed", "KeyError: 'price'")
    assert browser.count("svg.workflow .workflow-box") == 3
    browser.press("Retry")
    browser.press("Retry")
    browser.shows("retried")

    shop.rows("DELETE FROM jsworker.dead_messages")
    shop.add_dead_messages(2)
    browser.open("/dead-messages")
    browser.find("[data-selects-all]").click()
    assert browser.count('input[name="id"]:checked') == 2
    browser.press("Drop")
    browser.press("Drop 2 messages")
    browser.shows("2 messages dropped", "There are no dead messages.")


def test_a_job_is_enqueued_by_a_form(browser: Browser, shop: Shop) -> None:
    browser.open("/enqueue")
    browser.type("kind", "send-invoice")
    browser.press("Go on")
    browser.shows("number", "customer (optional)")
    for field in browser.all("main label"):
        if field.text.startswith("number"):
            field.click()
            browser.driver.focused().type("42")
    browser.press("Enqueue a job")
    browser.shows("is enqueued", "completed", '"invoice": 1042')


def test_the_keyboard_is_enough(browser: Browser, shop: Shop) -> None:
    waiting = shop.enqueue("send-invoice", {"number": 6}, delay=LATER)
    browser.open(f"/jobs/{waiting}")
    browser.driver.focused().type(TAB)
    assert browser.driver.focused().text == "Skip to the content"
    browser.driver.focused().type(ENTER)
    for _ in range(10):
        browser.driver.focused().type(TAB)
        if browser.driver.focused().text.startswith("Cancel"):
            break
    browser.driver.focused().type(ENTER)
    browser.shows("Cancel 1 job?")
    for _ in range(40):
        browser.driver.focused().type(TAB)
        if browser.driver.focused().text == "Cancel 1 job":
            break
    browser.driver.focused().type(ENTER)
    browser.shows("1 job cancelled")
    assert shop.status(waiting) == "cancelled"


def test_the_audit_tells_who_did_what(browser: Browser, shop: Shop) -> None:
    """The last test: what the others did."""
    browser.open("/audit")
    browser.shows(
        "retry", "cancel", "clear", "pause", "resume", "schedules.run_now", "dead_messages.drop", "enqueue"
    )
