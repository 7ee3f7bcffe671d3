// What pages do beyond HTML; they work without it.
"use strict";

// A live part does not replace what the viewer is working with: selected text, ticked boxes, what has the focus of the
// keyboard. A click leaves a focus, too, but not one to keep: the part would stay old until the next click outside it.
// It is given to the same element of the new part. An opened <details>, known by its summary, is open again there, and
// what was scrolled stays scrolled.
const nameOf = (each) =>
  each.matches("summary") ? each.textContent : each.getAttribute("href") ?? each.getAttribute("aria-label");
const summaryOf = (details) => details.querySelector("summary").textContent;
const scrollersOf = (part) =>
  [...part.querySelectorAll('[tabindex="0"]')].map((each, place) => [each.getAttribute("aria-label") ?? place, each]);
const isInUse = (part) => {
  const selection = document.getSelection();
  const isSelecting = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
  return isSelecting || part.querySelector("input:checked, :focus-visible:not(summary)") !== null;
};
let opened = [];
let focused = null;
let scrolled = new Map();
document.addEventListener("htmx:sseBeforeMessage", (event) => {
  const part = event.target;
  if (isInUse(part)) {
    event.preventDefault();
    keep(part);
  }
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  focused = focus && nameOf(focus);
  opened = [...part.querySelectorAll("details[open]")].map(summaryOf);
  scrolled = new Map(scrollersOf(part).map(([name, each]) => [name, [each.scrollLeft, each.scrollTop]]));
});
document.addEventListener("htmx:sseMessage", (event) => {
  for (const details of event.target.querySelectorAll("details")) {
    details.open = opened.includes(summaryOf(details));
  }
  if (focused !== null) {
    const same = [...event.target.querySelectorAll("summary, a, [tabindex]")].find((each) => nameOf(each) === focused);
    same?.focus({ preventScroll: true });
  }
  for (const [name, each] of scrollersOf(event.target)) [each.scrollLeft, each.scrollTop] = scrolled.get(name) ?? [0, 0];
});

// As the times beside it are.
const timeOf = (milliseconds) => `${new Date(milliseconds).toISOString().slice(11, 19)} UTC`;

// Parts that are kept as they are would pass for new ones. When the viewer has done, the stream brings what they missed.
const KEPT_UNTOLD = 10_000;
const kept = new Map();
const keep = (part) => {
  if (!kept.size) setTimeout(watchKept, 1000);
  if (!kept.has(part)) kept.set(part, Date.now());
};
const watchKept = () => {
  let isMissing = false;
  for (const part of kept.keys()) {
    if (part.isConnected && isInUse(part)) continue;
    kept.delete(part);
    isMissing = true;
  }
  if (isMissing && !document.hidden) for (const stream of streams) stream.open();
  const notice = document.querySelector("[data-kept]");
  const since = Math.min(...kept.values());
  notice.hidden = Date.now() - since < KEPT_UNTOLD || !kept.size;
  notice.firstElementChild.textContent = timeOf(kept.size ? since : 0);
  if (kept.size) setTimeout(watchKept, 1000);
};

document.addEventListener("change", (event) => {
  if (!event.target.matches("input[data-selects-all]")) return;
  for (const box of event.target.form.querySelectorAll('input[name="id"]')) box.checked = event.target.checked;
});

// Of a double click the second one would send the form again: two jobs. For a while only, for a viewer may stop a page.
const SENT_ONCE_WITHIN = 10_000;
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.sent) event.preventDefault();
  else if (form.method === "post") {
    form.dataset.sent = "yes";
    setTimeout(() => delete form.dataset.sent, SENT_ONCE_WITHIN);
  }
});

// On a phone the navigation is wider than the page. Not by scrollIntoView, which moves where the first Tab begins.
const current = document.querySelector(".top nav [aria-current]");
if (current) {
  const navigation = current.parentElement;
  navigation.scrollLeft = current.offsetLeft + (current.offsetWidth - navigation.clientWidth) / 2;
}

// Hidden tabs keep no stream: over HTTP/1.1 a browser opens six to a host, and waits with everything else.
// After a refusal, of a proxy whose server is away for example, the extension would wait longer each time, up to a
// minute: a stream opens itself again after some seconds, not all viewers' at the same time.
const streams = new Set();

// A page whose server is away, or refuses the viewer by now, would go on to show old figures as if they were new. The
// server ends each stream after 30 s and the browser opens the next one, so one that does not open is late.
const OPENS_WITHIN = 10_000;
const OPENS_AGAIN_WITHIN = 45_000;
const late = new Set();
const notice = document.querySelector("[data-late]");
const showLate = () => {
  if (notice.hidden && late.size) {
    notice.firstElementChild.textContent = timeOf(Math.min(...[...late].map((stream) => stream.openedAt)));
  }
  notice.hidden = !late.size;
};

class Stream {
  #listeners = [];
  #timer = null;
  #watch = null;
  #isAwaited = false;
  constructor(url) {
    this.url = url;
    this.openedAt = Date.now();
    streams.add(this);
    if (!document.hidden) this.open();
  }
  open() {
    clearTimeout(this.#timer);
    this.source?.close();
    this.source = new EventSource(this.url);
    for (const given of this.#listeners) this.source.addEventListener(...given);
    this.#await();
    this.source.onopen = () => {
      this.openedAt = Date.now();
      this.#isAwaited = false;
      late.delete(this);
      showLate();
      this.#expectWithin(OPENS_AGAIN_WITHIN);
    };
    this.source.onerror = (event) => {
      this.#await();
      if (event.target.readyState === EventSource.CLOSED) this.#timer = setTimeout(() => this.open(), 1000 + 5000 * Math.random());
    };
  }
  #await() {
    if (!this.#isAwaited) this.#expectWithin(OPENS_WITHIN);
    this.#isAwaited = true;
  }
  #expectWithin(milliseconds) {
    clearTimeout(this.#watch);
    this.#watch = setTimeout(() => {
      late.add(this);
      showLate();
      // A connection that is gone without a word, after a sleep for example, stays open for the browser.
      this.open();
      this.#expectWithin(OPENS_AGAIN_WITHIN);
    }, milliseconds);
  }
  rest() {
    clearTimeout(this.#timer);
    clearTimeout(this.#watch);
    this.#isAwaited = false;
    this.source?.close();
  }
  close() {
    this.rest();
    streams.delete(this);
    late.delete(this);
    showLate();
  }
  addEventListener(...given) {
    this.#listeners.push(given);
    this.source?.addEventListener(...given);
  }
  removeEventListener(...given) {
    this.#listeners = this.#listeners.filter(([name, listener]) => name !== given[0] || listener !== given[1]);
    this.source?.removeEventListener(...given);
  }
}
htmx.createEventSource = (url) => new Stream(url);
document.addEventListener("visibilitychange", () => {
  for (const stream of streams) document.hidden ? stream.rest() : stream.open();
});
