"""What the script of the dashboard's pages does, in Node with a clock and streams of the test.

Run by ``make verify``; needs nodejs (Debian package).
"""

import subprocess
from pathlib import Path

import pytest

import jsworker.dashboard

pytestmark = pytest.mark.verify

SCRIPT = Path(jsworker.dashboard.__file__).parent / "static" / "dashboard.js"

BROWSER = """
const listeners = {}, timers = new Map(), sources = [];
let now = 1_000_000, numbers = 0;
Date.now = () => now;
Math.random = () => 0;
globalThis.setTimeout = (run, after) => (timers.set(++numbers, { run, at: now + after }), numbers);
globalThis.clearTimeout = (number) => timers.delete(number);
const advance = (seconds) => {
  const until = now + seconds * 1000;
  for (;;) {
    const [next] = [...timers].filter(([, timer]) => timer.at <= until).sort((a, b) => a[1].at - b[1].at);
    if (!next) break;
    timers.delete(next[0]);
    now = next[1].at;
    next[1].run();
  }
  now = until;
};
globalThis.EventSource = class {
  static CONNECTING = 0;
  static CLOSED = 2;
  constructor() { sources.push(this); }
  addEventListener() {}
  close() {}
};
const lateNotice = { hidden: true, firstElementChild: {} };
globalThis.document = {
  hidden: false,
  addEventListener: (name, listener) => (listeners[name] = listener),
  querySelector: (wanted) => (wanted === "[data-late]" ? lateNotice : null),
};
globalThis.htmx = {};
const opens = () => sources.at(-1).onopen();
const fails = (readyState) => sources.at(-1).onerror({ target: { readyState } });
const expect = (is, what) => { if (!is) throw new Error(what); };
"""

STORIES = {
    "a stream that the server ends in time": """
        for (let turn = 0; turn < 10; turn++) {
          opens();
          advance(30);
          fails(EventSource.CONNECTING);
          advance(1);
          expect(lateNotice.hidden, "late");
        }
    """,
    "a server that is gone, and comes back": """
        opens();
        const since = "00:16:40 UTC";
        advance(5);
        fails(EventSource.CONNECTING);
        advance(4);
        expect(lateNotice.hidden, "late at once");
        for (let turn = 0; turn < 5; turn++) { fails(EventSource.CONNECTING); advance(3); }
        expect(!lateNotice.hidden, "not late");
        expect(lateNotice.firstElementChild.textContent === since, "wrong time");
        opens();
        expect(lateNotice.hidden, "late for ever");
    """,
    "a viewer who is refused each time": """
        opens();
        advance(30);
        for (let turn = 0; turn < 30; turn++) { fails(EventSource.CLOSED); advance(1); }
        expect(!lateNotice.hidden, "not late");
    """,
    "a server that is frozen, or was from the beginning": """
        advance(11);
        expect(!lateNotice.hidden, "not late at the beginning");
        opens();
        expect(lateNotice.hidden, "late for ever");
        advance(46);
        expect(!lateNotice.hidden, "not late");
    """,
    "a tab that is hidden for an hour": """
        opens();
        document.hidden = true;
        listeners.visibilitychange();
        advance(3600);
        expect(lateNotice.hidden, "late while hidden");
        document.hidden = false;
        listeners.visibilitychange();
        advance(1);
        expect(lateNotice.hidden, "late at once");
        opens();
        advance(30);
        expect(lateNotice.hidden, "late");
    """,
}


@pytest.mark.parametrize("story", STORIES)
def test_a_page_says_when_it_is_not_updated_any_more(story: str) -> None:
    program = "\n".join([BROWSER, SCRIPT.read_text(), 'htmx.createEventSource("/");', STORIES[story]])
    done = subprocess.run(
        ["node", "-"], input=program, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
