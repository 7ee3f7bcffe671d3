// What pages do beyond HTML; they work without it.
"use strict";

// A live part does not replace what the viewer is working with: selected text, ticked boxes, the focus. An opened
// <details> is open again in the new one, which is known by its summary.
const summaryOf = (details) => details.querySelector("summary").textContent;
let opened = [];
let focused = null;
document.addEventListener("htmx:sseBeforeMessage", (event) => {
  const part = event.target;
  const selection = document.getSelection();
  const isSelecting = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  focused = focus?.matches("summary") ? focus.textContent : null;
  if (isSelecting || part.querySelector("input:checked") || (focus && focused === null)) event.preventDefault();
  opened = [...part.querySelectorAll("details[open]")].map(summaryOf);
});
document.addEventListener("htmx:sseMessage", (event) => {
  for (const details of event.target.querySelectorAll("details")) {
    details.open = opened.includes(summaryOf(details));
    if (summaryOf(details) === focused) details.querySelector("summary").focus();
  }
});

document.addEventListener("change", (event) => {
  if (!event.target.matches("input[data-selects-all]")) return;
  for (const box of event.target.form.querySelectorAll('input[name="id"]')) box.checked = event.target.checked;
});

// On a phone the navigation is wider than the page.
document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// Hidden tabs keep no stream: over HTTP/1.1 a browser opens six to a host, and waits with everything else.
let streams = [];
htmx.createEventSource = (url) => {
  const stream = new EventSource(url);
  streams.push(stream);
  return stream;
};
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    for (const stream of streams) stream.close();
    return;
  }
  const closed = streams.filter((stream) => stream.readyState === EventSource.CLOSED);
  streams = streams.filter((stream) => stream.readyState !== EventSource.CLOSED);
  for (const stream of closed) stream.dispatchEvent(new Event("error")); // so that the extension opens another
});
