import asyncio
import base64
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount

from jsworker import JobClient
from jsworker.core.errors import SettingsError
from jsworker.core.settings import Settings
from jsworker.dashboard import ACTIONS as RIGHTS
from jsworker.dashboard import Access, PasswordFile, ProxyHeaders, authentication, dashboard
from jsworker.dashboard.access import HEADERS, access_of
from jsworker.dashboard.app import ACTIONS
from jsworker.dashboard.authentication import login_line
from tests.dashboard.conftest import PutJob
from tests.dashboard.viewer import Viewer
from tests.support.polling import eventually
from tests.worker.rows import Rows

SECRET = "a secret of the proxy"


def asked(headers: dict[str, str] | None = None, client: str = "127.0.0.1") -> Request:
    given = {"host": "localhost"} | (headers or {})
    raw = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    return Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": raw,
            "client": (client, 1),
            "query_string": b"",
            "scheme": "http",
            "server": ("localhost", 80),
        }
    )


def basic(name: str, password: str) -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}


# Without a login


async def test_without_a_login_it_answers_to_this_machine_alone() -> None:
    assert await access_of(asked(), None, None) == Access.ALL
    assert await access_of(asked({"host": "[::1]:8100"}, client="::1"), None, None) == Access.ALL
    by_socket_file = asked()
    by_socket_file.scope["client"] = None
    for request in (
        by_socket_file,
        asked(client="10.0.0.7"),
        asked({"host": "jobs.example"}),
        asked({"host": "localhost.evil.example"}),
        asked({"host": ""}),
        asked({"x-forwarded-for": "10.0.0.7"}),
        asked({"forwarded": "for=10.0.0.7"}),
        asked({"x-forwarded-proto": "https"}),
        asked({"Via": "1.1 proxy"}),
    ):
        refused = await access_of(request, None, None)
        assert not isinstance(refused, Access)
        assert refused.status_code == 403
        assert bytes(refused.body).count(b"\n") == 1


@pytest.mark.parametrize("path", ["", "/ops/jobs"])
async def test_a_probe_needs_neither_a_login_nor_the_host_name_nor_a_server(path: str) -> None:
    """The client is not open, and its database not there."""
    away = JobClient(Settings(database_url="postgresql://nobody@127.0.0.1:1/none"))
    served = dashboard(away, authorize=lambda _: None, hosts={"jobs.example"})
    mounted = Starlette(routes=[Mount(path, served)])
    viewer = Viewer(mounted, headers={"host": "10.0.0.7:8100"})
    assert (await viewer.see(f"{path}/healthz")).source == "ok\n"
    await viewer.see(f"{path}/", 421)
    await viewer.see(f"{path}/healthz/", 421)
    await viewer.http.aclose()


async def test_other_host_names_are_refused_even_with_a_login() -> None:
    def everybody(request: Request) -> Access:
        return Access.READ

    assert await access_of(asked({"host": "Jobs.example:443"}), everybody, {"jobs.example"}) == Access.READ
    refused = await access_of(asked({"host": "rebound.example"}), everybody, {"jobs.example"})
    assert not isinstance(refused, Access)
    assert refused.status_code == 421


# Forms that other pages send


@pytest.fixture
async def form(client: JobClient, put: PutJob) -> tuple[Viewer, str, dict[str, Any]]:
    viewer = Viewer(dashboard(client))
    job_id = await put("queued")
    question = await viewer.see(f"/jobs/{job_id}/cancel")
    return viewer, f"/jobs/{job_id}/cancel", dict(question.forms[-1].values)


@pytest.mark.parametrize(
    ("headers", "changes"),
    [
        ({"origin": "http://evil.example"}, {}),
        ({"origin": "null"}, {}),
        ({}, {}),
        ({"origin": "http://localhost:81"}, {}),
        ({"origin": "http://localhost", "sec-fetch-site": "cross-site"}, {}),
        ({"origin": "http://localhost", "sec-fetch-site": "same-site"}, {}),
        ({"origin": "http://localhost"}, {"csrf": "0" * 64}),
        ({"origin": "http://localhost"}, {"csrf": ""}),
        ({"origin": "http://localhost", "cookie": "jsworker-csrf="}, {}),
        ({"origin": "http://localhost", "cookie": f"jsworker-csrf={'x' * 43}"}, {}),
    ],
    ids=[
        *("other origin", "null", "no origin", "other port", "cross-site", "same-site"),
        *("token", "no token", "no cookie", "other cookie"),
    ],
)
async def test_a_form_of_another_page_changes_nothing(
    form: tuple[Viewer, str, dict[str, Any]], rows: Rows, headers: dict[str, str], changes: dict[str, str]
) -> None:
    viewer, address, values = form
    answer = await viewer.http.post(address, data=values | changes, headers=headers)
    assert answer.status_code == 403
    # A viewer whose browser has lost the cookie finds a page that leads back; other sites get a line.
    is_from_own_page = headers.get("origin") == "http://localhost" and "sec-fetch-site" not in headers
    assert ("was shown in another session" if is_from_own_page else "refused: ") in answer.text
    assert ("<h1>Refused</h1>" in answer.text) is is_from_own_page
    assert await rows.value("SELECT status FROM jsworker.jobs") == "queued"
    # And the same form, sent by its own page, is taken.
    own = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
    assert (await viewer.http.post(address, data=values, headers=own)).status_code == 200
    assert await rows.value("SELECT status FROM jsworker.jobs") == "cancelled"


async def test_a_form_is_parsed_only_if_its_own_page_has_sent_it_in_utf8(
    form: tuple[Viewer, str, dict[str, Any]], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer, address, values = form
    own, multipart = {"origin": "http://localhost"}, "multipart/form-data; boundary=B; charset="
    body = b"".join(
        f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in values.items()
    )
    answer = await viewer.http.post(
        address, content=body + b"--B--\r\n", headers=own | {"content-type": f"{multipart}UTF-8"}
    )
    assert answer.status_code == 200
    assert await rows.value("SELECT status FROM jsworker.jobs") == "cancelled"
    parsed: list[Request] = []
    monkeypatch.setattr(Request, "form", lambda request, **_: parsed.append(request))
    for charset in ("punycode", "undefined", "utf-7"):
        head = own | {"content-type": f"{multipart}{charset}"}
        assert (await viewer.http.post(address, content=body, headers=head)).status_code == 415
    for origin in ({}, {"origin": "http://evil.example"}):
        assert (await viewer.http.post(address, data=values, headers=origin)).status_code == 403
    assert parsed == []


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
async def test_no_action_is_done_without_its_token(
    client: JobClient, put: PutJob, rows: Rows, action: Any
) -> None:
    job_id = await put("queued")
    viewer = Viewer(dashboard(client))
    address = action.path.replace("{id:uuid}", str(job_id))
    own = {"origin": "http://localhost"}
    given = {"confirmed": "yes", "id": str(job_id), "kind": "crop", "payload": "{}", "reason": "x"}
    assert (await viewer.http.post(address, data=given, headers=own)).status_code == 403
    await viewer.http.get(address, params=given)  # asks at most
    assert [row["status"] for row in await rows.query("SELECT status FROM jsworker.jobs")] == ["queued"]
    assert await client.audit() == []


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
async def test_each_action_needs_its_right(client: JobClient, put: PutJob, rows: Rows, action: Any) -> None:
    job_id = await put("queued")
    others = Access(RIGHTS - {action.right}, payloads=True)
    viewer = Viewer(dashboard(client, authorize=lambda _: others))
    allowed = "retry" if action.right == "cancel" else "cancel"
    form = (await viewer.see(f"/jobs/{job_id}/{allowed}")).forms[-1]
    address = action.path.replace("{id:uuid}", str(job_id))
    given = {"confirmed": "yes", "id": str(job_id), "kind": "crop", "payload": "{}", "reason": "x"}
    given |= {"csrf": dict(form.values)["csrf"], "worker": "w", "name": "n", "to": "high"}
    refused = [
        await viewer.http.get(address, params=given),
        await viewer.http.post(address, data=given, headers={"origin": "http://localhost"}),
    ]
    for answer in refused:
        assert answer.status_code == 403
        assert f"you may not do this: {action.right}<" in answer.text
    assert await rows.query("SELECT status, priority FROM jsworker.jobs") == [
        {"status": "queued", "priority": 1}
    ]
    assert await client.audit() == []
    for page in ("/", "/jobs", f"/jobs/{job_id}", "/kinds", "/schedules", "/workers", "/dead-messages"):
        shown = await viewer.see(page)
        buttons = [found.get("formaction") for _, found in shown.elements]
        assert not [to for to in (*shown.addresses, *buttons) if to and to.partition("?")[0] == address]


async def test_a_form_must_say_its_length_and_be_short(form: tuple[Viewer, str, dict[str, Any]]) -> None:
    viewer, address, _ = form

    async def parts() -> Any:
        yield b"confirmed=yes"

    headers = {"origin": "http://localhost", "content-type": "application/x-www-form-urlencoded"}
    assert (await viewer.http.post(address, content=parts(), headers=headers)).status_code == 413
    long = {"reason": "x" * 5_000_000}
    assert (await viewer.http.post(address, data=long, headers=headers)).status_code == 413
    for said in (
        {"content-length": "00000000000019999999"},
        {"content-length": "9", "transfer-encoding": "chunked"},
    ):
        given = await viewer.http.post(address, content=parts(), headers=headers | said)
        assert given.status_code == 413


async def test_each_answer_has_the_headers_of_safety(client: JobClient) -> None:
    app = dashboard(client)
    viewer, elsewhere = Viewer(app), Viewer(app, base_url="http://other.example")
    answers = [
        await viewer.http.get(address) for address in ("/", "/jobs", "/nothing", "/static/dashboard.css")
    ]
    answers += [await elsewhere.http.get("/"), await viewer.http.post("/jobs/cancel")]
    for answer in answers:
        for name, value in HEADERS.items():
            if not (name == "cache-control" and answer.url.path.startswith("/static/")):
                assert answer.headers[name] == value
    policy = HEADERS["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    cookie = answers[0].headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


async def test_an_address_with_a_long_query_is_refused(client: JobClient) -> None:
    viewer = Viewer(dashboard(client))
    assert "at most 8192 bytes" in (await viewer.http.get(f"/jobs?x={'y' * 8_191}")).text
    assert (await viewer.http.get(f"/jobs?x={'y' * 8_191}")).status_code == 414
    assert (await viewer.http.get(f"/jobs?error={'y' * 900}&x={'y' * 7_000}")).status_code == 200


async def test_a_slash_too_many_is_no_reason_to_leave_https(client: JobClient) -> None:
    viewer = Viewer(dashboard(client, authorize=lambda _: Access.READ), follow_redirects=False)
    answer = await viewer.http.get("/jobs/", headers={"x-forwarded-proto": "https"})
    assert answer.status_code == 404


async def test_behind_https_the_cookie_is_for_this_host_and_https_alone(client: JobClient) -> None:
    viewer = Viewer(dashboard(client, authorize=lambda _: Access.READ), base_url="https://jobs.example")
    cookie = (await viewer.http.get("/")).headers["set-cookie"]
    assert cookie.startswith("__Host-jsworker-csrf=")
    assert "; Secure" in cookie


async def test_pages_hold_no_inline_script_or_style(client: JobClient, put: PutJob) -> None:
    job_id = await put("failed")
    viewer = Viewer(dashboard(client))
    for address in (
        "/",
        "/jobs",
        f"/jobs/{job_id}",
        "/failures",
        "/enqueue?kind=crop",
        f"/jobs/{job_id}/retry",
    ):
        page = await viewer.see(address)
        for tag, found in page.elements:
            assert tag != "style"
            assert tag != "script" or found["src"].startswith("/static/")
            assert not [name for name in found if name == "style" or name.startswith("on")]


# Logins


@pytest.fixture
def logins(tmp_path: Path) -> Path:
    file = tmp_path / "logins"
    lines = [
        "# people",
        login_line("ann", "right horse", "retry, payloads"),
        login_line("bob", "pass:word", "read"),
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize("name", ["#ann", " ann", "ann:x", " ", ""])
def test_a_name_that_a_line_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must "):
        login_line(name, "right horse", "read")


def test_a_password_is_not_in_its_line() -> None:
    assert "right horse" not in login_line("ann", "right horse", "read")


async def test_a_file_of_hashed_passwords_lets_in_who_knows_one(logins: Path) -> None:
    known = PasswordFile(logins)
    ann = Access({"retry"}, payloads=True, name="ann")
    assert await known(asked(basic("ann", "right horse"))) == ann
    assert await known(asked(basic("ann", "right horse"))) == ann
    assert await known(asked(basic("bob", "pass:word"))) == Access(name="bob")
    wrong = [basic("ann", "pass:word"), basic("eve", ""), basic("", ""), {"authorization": "Basic ü"}, {}]
    for headers in wrong:
        question = await known(
            asked({name: value.encode().decode("latin-1") for name, value in headers.items()})
        )
        assert not isinstance(question, Access)
        assert question.status_code == 401
        assert question.headers["www-authenticate"].startswith("Basic ")


async def test_a_changed_file_is_read_again(logins: Path) -> None:
    known = PasswordFile(logins)
    assert isinstance(await known(asked(basic("ann", "right horse"))), Access)
    logins.write_text(login_line("ann", "new horse", "all"))  # noqa: ASYNC240 -- a few bytes
    os.utime(logins, (1, 1))
    assert not isinstance(await known(asked(basic("ann", "right horse"))), Access)
    assert await known(asked(basic("ann", "new horse"))) == Access(
        Access.ALL.actions, payloads=True, name="ann"
    )


async def test_a_file_that_got_a_wrong_line_is_used_as_it_was_before(
    logins: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = PasswordFile(logins)
    assert isinstance(await known(asked(basic("ann", "right horse"))), Access)
    logins.write_text(f"{login_line('bob', 'other', 'read')}\nbill")  # noqa: ASYNC240 -- a few bytes
    for name, password in (("ann", "right horse"), ("bob", "pass:word")):
        assert isinstance(await known(asked(basic(name, password))), Access)
    assert not isinstance(await known(asked(basic("bob", "other"))), Access)
    [told] = caplog.messages
    assert "logins, line 2: must be as" in told
    logins.write_text(login_line("bob", "other", "read"))  # noqa: ASYNC240 -- likewise
    assert isinstance(await known(asked(basic("bob", "other"))), Access)
    assert not isinstance(await known(asked(basic("ann", "right horse"))), Access)
    logins.unlink()  # noqa: ASYNC240 -- likewise
    for _ in range(2):
        refused = await known(asked(basic("bob", "pass:word")))
        assert isinstance(refused, Response)
        assert refused.status_code == 503
    assert [line.partition(": ")[2] for line in caplog.messages[1:]] == [
        "No such file or directory; all logins are refused"
    ]


async def test_a_login_that_is_removed_while_it_is_checked_is_not_remembered(
    logins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, hashed, rest = PasswordFile(logins), authentication._hashed, login_line("bob", "pass:word", "read")

    def removed_meanwhile(password: str, salt: bytes) -> bytes:
        if logins.stat().st_size != len(rest):
            logins.write_text(rest)
            known._read()
        return hashed(password, salt)

    monkeypatch.setattr(authentication, "_hashed", removed_meanwhile)
    for _ in range(2):
        assert not isinstance(await known(asked(basic("ann", "right horse"))), Access)


async def test_no_more_logins_wait_for_their_check_than_can_be_made_soon(
    logins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, hashed, may_go_on = PasswordFile(logins), authentication._hashed, threading.Event()
    ann, bob = asked(basic("ann", "right horse")), asked(basic("bob", "pass:word"))
    assert isinstance(await known(ann), Access)

    def held_up(password: str, salt: bytes) -> bytes:
        may_go_on.wait()
        return hashed(password, salt) if password == "pass:word" else b"wrong"

    monkeypatch.setattr(authentication, "_hashed", held_up)
    guesses = [asked(basic("eve", str(number))) for number in range(20)]
    checks = [asyncio.create_task(known(request)) for request in [bob, *guesses, *guesses]]
    try:

        async def refused() -> list[Any]:
            answers = [check.result() for check in checks if check.done()]
            assert len(answers) == len(guesses)
            return answers

        for answer in await eventually(refused):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert isinstance(await known(ann), Access)  # who was let in before needs no check
    finally:
        may_go_on.set()
    first, *others = (await asyncio.gather(*checks))[:21]
    assert first == Access(name="bob")
    assert {answer.status_code for answer in others if isinstance(answer, Response)} == {401}
    assert isinstance(await known(asked(basic("bob", "pass:word"))), Access)


def test_a_wrong_line_is_named_without_its_content(tmp_path: Path) -> None:
    file = tmp_path / "logins"
    for line in ("ann:right horse:read", "ann", login_line("ann", "x", "read").replace("read", "write")):
        file.write_text(f"\n{line}\n")
        with pytest.raises(SettingsError, match=r"logins, line 2") as refusal:
            PasswordFile(file)
        assert "right horse" not in str(refusal.value)


def test_users_of_a_proxy_have_the_rights_of_their_groups() -> None:
    proxy = ProxyHeaders(
        SECRET, groups={"ops": Access({"retry"}), "dev": Access(payloads=True)}, everybody=Access.READ
    )

    def access(**headers: str) -> Access | None:
        return proxy(asked({name.replace("_", "-"): value for name, value in headers.items()}))

    told = {"x_jsworker_secret": SECRET, "x_forwarded_user": "ann"}
    assert access(**told) == Access(name="ann")
    assert access(**told, x_forwarded_groups="dev, ops") == Access({"retry"}, payloads=True, name="ann")
    assert access(x_forwarded_user="ann") is None
    assert access(x_jsworker_secret="another secret", x_forwarded_user="ann") is None
    assert access(x_jsworker_secret=SECRET) is None
    assert (
        ProxyHeaders(SECRET, groups={"ops": Access.ALL})(
            asked({"x-jsworker-secret": SECRET, "x-forwarded-user": "ann"})
        )
        is None
    )
    for name in ("x-jsworker-secret", "x-forwarded-user", "x-forwarded-groups"):  # it passes on what it gets
        request = asked({"x-jsworker-secret": SECRET, "x-forwarded-user": "ann", "x-forwarded-groups": "dev"})
        request.scope["headers"].insert(0, (name.encode(), SECRET.encode()))
        assert proxy(request) is None
    with pytest.raises(SettingsError):
        ProxyHeaders("short")


def test_secret_user_and_groups_of_a_proxy_are_utf8() -> None:
    secret = "ein Geheimnis für den Proxy"
    proxy = ProxyHeaders(secret, groups={"Büro": Access.ALL})
    told = {"x-jsworker-secret": secret, "x-forwarded-user": "jürgen", "x-forwarded-groups": "ops,Büro"}
    assert proxy(asked(told)) == replace(Access.ALL, name="jürgen")
    request = asked({"x-jsworker-secret": secret, "x-forwarded-groups": "Büro"})
    request.scope["headers"].append((b"x-forwarded-user", "jürgen".encode("latin-1")))
    assert proxy(request) == replace(Access.ALL, name="j\N{REPLACEMENT CHARACTER}rgen")


async def _raises(request: Request) -> Access:
    raise HTTPException(401, "log in", {"www-authenticate": "Bearer"})


async def _nobody(request: Request) -> None:
    return None


async def _somebody(request: Request) -> Access:
    return Access(name="ann")


@pytest.mark.parametrize(
    ("authorize", "status"),
    [
        (_nobody, 403),
        (_raises, 401),
        (lambda _: None, 403),
        (lambda _: RedirectResponse("/login", 307), 307),
        (_somebody, 200),
        (lambda _: Access.READ, 200),
    ],
    ids=["none", "raises", "none, sync", "redirect", "access", "access, sync"],
)
async def test_any_callable_decides(
    client: JobClient, authorize: Callable[[Request], Awaitable[Any] | Any], status: int
) -> None:
    viewer = Viewer(
        dashboard(client, authorize=authorize), base_url="http://jobs.example", follow_redirects=False
    )
    assert (await viewer.http.get("/")).status_code == status
    assert (await viewer.http.get("/static/dashboard.css")).status_code == status


async def test_authorize_that_returns_something_else_lets_nobody_in(client: JobClient) -> None:
    viewer = Viewer(dashboard(client, authorize=lambda _: True))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="not bool"):
        await viewer.http.get("/")


@pytest.mark.parametrize("actions", [{"retri"}, "retry"])
def test_an_access_names_actions_that_there_are(actions: Any) -> None:
    with pytest.raises(ValueError, match="must be a set"):
        Access(actions)


async def test_the_name_of_the_viewer_is_in_the_audit(
    client: JobClient, put: PutJob, settings: Settings
) -> None:
    job_id = await put("queued")
    viewer = Viewer(dashboard(client, authorize=lambda _: Access({"cancel"}, name="ann")))
    await viewer.press(await viewer.see(f"/jobs/{job_id}/cancel"), "Cancel")
    [action] = await client.audit()
    assert (action.actor, action.action) == ("ann", "cancel")
