// Live parts do not replace what the viewer is working with: text that is selected, boxes that are ticked, a form
// that has the focus, or a <details> that was opened.
"use strict";

document.addEventListener("htmx:sseBeforeMessage", (event) => {
  const part = event.target;
  const selection = document.getSelection();
  const isSelecting = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
  const isBusy = part.querySelector("input:checked, details[open]") || part.contains(document.activeElement);
  if (isSelecting || isBusy) event.preventDefault();
});

document.addEventListener("change", (event) => {
  if (!event.target.matches("input[data-selects-all]")) return;
  for (const box of event.target.form.querySelectorAll('input[name="id"]')) box.checked = event.target.checked;
});
