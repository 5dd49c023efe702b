// What happened to an item. The search is in the address: the form and the links lead to this page again.

import { attempt, call } from "./api.js";
import { $, drawBadge, el, mixed, moment, setText, show, user } from "./dom.js";
import { t, tn } from "./i18n.js";
import { STATUSES, count, heard } from "./words.js";

const { search, page, jobs, tasks } = $("#search-card").dataset;
const PAGE = 25;

/** What the address asks for, without what it leaves empty; `more` replaces parts of it. */
function asked(more = {}) {
  const given = new URLSearchParams(location.search);
  const all = { q: given.get("q"), field: given.get("field"), worker: given.get("worker"), owner: given.get("owner"), after: given.get("after"), ...more };
  return new URLSearchParams(Object.entries(all).filter(([, value]) => value));
}

const address = (more) => `${page}?${asked(more)}`;

function line(job) {
  const badge = el("span");
  drawBadge(badge, [STATUSES[job.status] ?? job.status, job.status]);
  const title = job.task_title ? user(job.task_title) : t("Task {task}", { task: job.task_id });
  return el("tr", {},
    el("td", {}, el("strong", {}, user(job.value)), " ", el("small", {}, user(job.field))),
    el("td", {}, badge),
    mixed("td", heard(job.messages.at(-1)?.message ?? "")),
    el("td", {}, job.task_id === null ? t("none") : el("a", { href: `${tasks}/${job.task_id}` }, title)),
    el("td", { class: "number" }, job.row === null ? "" : count(job.row)),
    el("td", {}, moment(job.finished_at ?? job.started_at ?? job.created_at)),
    el("td", {}, el("a", { class: "id", href: `${jobs}/${encodeURIComponent(job.job_id)}` }, el("bdi", {}, job.job_id))));
}

function draw({ events, links }) {
  $("#found tbody").replaceChildren(...events.map(line));
  show($("#found-box"), events.length > 0);
  const { q, after } = Object.fromEntries(asked());
  const more = links.next === null ? null : new URL(links.next, location.href).searchParams.get("after");
  if (events.length) setText($("#summary"), tn("{n} job on this page.", "{n} jobs on this page.", events.length));
  else if (more !== null || after) setText($("#summary"), t("No job on this page."));
  else if (q.trimEnd().endsWith("*")) setText($("#summary"), t("No job has a value that begins with it."));
  else $("#summary").replaceChildren(t("No job has this value."), " ", el("a", { href: address({ q: `${q.trimEnd()}*` }) }, t("Search for values that begin with it")));
  $("#pages").replaceChildren(...[
    after && el("a", { class: "button ghost", href: address({ after: null }) }, t("← First")),
    more !== null && el("a", { class: "button ghost", href: address({ after: more }) }, t("Next →")),
  ].filter(Boolean));
  show($("#pages"), $("#pages").children.length > 0);
}

if (asked().has("q")) {
  setText($("#summary"), t("Searching…"));
  const done = await attempt($("#problem"), $("#find button"), async () => draw(await call(`${search}?${asked()}&limit=${PAGE}`, { has: "events" })));
  if (!done) setText($("#summary"), "");
}
