// The jobs without a Task, page by page. Filter and page are in the address, so that a link leads to them.

import { Poller } from "./api.js";
import { $, drawBadge, drawMixed, el, moment, pager, rowsOf, setText, show, user } from "./dom.js";
import { t } from "./i18n.js";
import { STATUSES, count, heard, when } from "./words.js";

const card = $("#jobs-card");
const body = $("#jobs tbody");
const form = $("#filter");
const PAGE = 25;

for (const [value, word] of Object.entries(STATUSES)) form.status.append(el("option", { value }, word));

// -- Which page --------------------------------------------------------------------------------------------------------

/** The keys after which the pages up to the shown one begin; null: the first. */
let starts = [null];
let next = null;

function address() {
  const query = new URLSearchParams();
  if (form.worker.value.trim()) query.set("worker", form.worker.value.trim());
  if (form.status.value) query.set("status", form.status.value);
  return query;
}

function restore() {
  const query = new URLSearchParams(location.search);
  form.worker.value = query.get("worker") ?? "";
  form.status.value = query.get("status") ?? "";
  starts = query.get("after") ? [null, query.get("after")] : [null];
}

/** The first request of a page, and its address. */
function open({ remember = true } = {}) {
  const query = address();
  if (starts.at(-1) !== null) query.set("after", starts.at(-1));
  if (remember) history.pushState(null, "", `${card.dataset.page}${query.size ? `?${query}` : ""}`);
  query.set("limit", PAGE);
  next = null;
  poller.url = `${card.dataset.jobs}?${query}`;
  poller.now();
}

const drawPager = pager($("#pager"), (button, step) => {
  if (step > 0 && next === null) return; // the page before is still on its way
  if (step > 0) starts.push(next);
  else if (starts.length > 1) starts.pop();
  open();
});

form.addEventListener("submit", (event) => { event.preventDefault(); starts = [null]; open(); });
form.status.addEventListener("change", () => { starts = [null]; open(); });
window.addEventListener("popstate", () => { restore(); open({ remember: false }); });

// -- The jobs ----------------------------------------------------------------------------------------------------------

const rows = rowsOf(body, { key: (job) => job.id, make: entry, fill });

function entry(job) {
  return el("tr", {},
    el("td", {}, el("a", { class: "id", href: `${card.dataset.page}/${encodeURIComponent(job.job_id)}` }, el("bdi", {}, job.job_id))),
    el("td", {}, user(job.worker)), el("td", {}, el("span", { class: "badge" }), el("small", { class: "below" })), el("td", { class: "number" }),
    el("td"), el("td", {}, moment(job.created_at)));
}

function fill(row, job) {
  drawBadge($(".badge", row), [STATUSES[job.status] ?? job.status, job.status]);
  setText($("small", row), job.due_at && new Date(job.due_at) > Date.now() ? t("due {time}", { time: when(job.due_at) }) : "");
  setText(row.children[3], count(job.attempt));
  drawMixed(row.children[4], heard(job.messages.at(-1)?.message ?? ""));
}

function draw(page) {
  $("#jobs").setAttribute("aria-busy", "false");
  rows(page.jobs);
  show($("#no-jobs"), page.jobs.length === 0);
  next = page.links.next === null ? null : new URL(page.links.next, location.href).searchParams.get("after");
  drawPager(starts.length > 1, next !== null);
}

const poller = new Poller("", { every: 2000, has: "jobs", onData: draw });
restore();
open({ remember: false });
