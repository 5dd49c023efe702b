// The jobs without a Task, page by page, the queues, and the schedules. Filter and page are in the address, so that a link leads to them.

import { Poller, attempt, call } from "./api.js";
import { sparkline } from "./chart.js";
import { $, $$, drawBadge, el, setText, show, user } from "./dom.js";
import { SKIPPED, STATUSES, count, duration, endedInHour, when } from "./words.js";

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
  drawPager();
  poller.url = `${card.dataset.jobs}?${query}`;
  poller.now();
}

const button = (word, turn) => {
  const node = el("button", { type: "button", class: "ghost" }, word);
  node.addEventListener("click", () => { turn(); open(); });
  return node;
};
const back = button("← Newer", () => starts.pop());
const on = button("Older →", () => starts.push(next));
$("#pager").append(back, on);

function drawPager() {
  back.disabled = starts.length === 1;
  on.disabled = next === null;
  const several = starts.length > 1 || next !== null;
  show(back, several);
  show(on, several);
}

form.addEventListener("submit", (event) => { event.preventDefault(); starts = [null]; open(); });
form.status.addEventListener("change", () => { starts = [null]; open(); });
window.addEventListener("popstate", () => { restore(); open({ remember: false }); });

// -- The jobs ----------------------------------------------------------------------------------------------------------

const shown = new Map();

function entry(job) {
  return el("tr", {},
    el("td", {}, el("a", { class: "id", href: `${card.dataset.page}/${encodeURIComponent(job.job_id)}` }, el("bdi", {}, job.job_id))),
    el("td", {}, user(job.worker)), el("td", {}, el("span", { class: "badge" })), el("td", { class: "number" }),
    el("td", {}, user("")), el("td", {}, when(job.created_at)));
}

function fill(row, job) {
  drawBadge($(".badge", row), [STATUSES[job.status] ?? job.status, job.status]);
  setText(row.children[3], count(job.attempt));
  setText($(".user", row.children[4]), job.messages.at(-1)?.message ?? "");
}

/** Rows are kept as long as they are on the page: whoever stands on one with the keyboard stays there. */
function draw(page) {
  $("#jobs").setAttribute("aria-busy", "false");
  const wanted = new Set(page.jobs.map((job) => job.id));
  for (const [id, row] of shown) {
    if (wanted.has(id)) continue;
    row.remove();
    shown.delete(id);
  }
  page.jobs.forEach((job, i) => {
    if (!shown.has(job.id)) shown.set(job.id, entry(job));
    const row = shown.get(job.id);
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
    fill(row, job);
  });
  show($("#no-jobs"), page.jobs.length === 0);
  next = page.links.next === null ? null : new URL(page.links.next, location.href).searchParams.get("after");
  drawPager();
}

const poller = new Poller("", { every: 2000, has: "jobs", onData: draw });
restore();
open({ remember: false });

// -- The queues --------------------------------------------------------------------------------------------------------

const others = ({ jobs_of_others: jobs, other_workers: workers }) => `${count(jobs)} for workers that its processes lack: ${workers.join(", ")}`;

const note = (queue) => [queue.paused && "paused", queue.unattended && "no process works it", queue.jobs_of_others && others(queue)]
  .filter(Boolean).join(", ");

/** What ended in each queue. */
const hours = new Map();
const hourOf = (name) => (hours.has(name) ? [hours.get(name)] : []);

new Poller(`${$("[data-history]").dataset.history}?by=queue`, {
  every: 60000,
  has: "series",
  onData({ series }) {
    hours.clear();
    for (const each of series) {
      const ended = each.finish.map((n, i) => n + each.failed[i] + each.error[i]);
      hours.set(each.name, sparkline(ended, { label: endedInHour(each.total), bad: each.error }));
    }
    for (const cell of $$("#queues [data-of]")) cell.replaceChildren(...hourOf(cell.dataset.of));
  },
}).start();

new Poller($("[data-queues]").dataset.queues, {
  every: 5000,
  has: "queues",
  onData({ queues }) {
    $("#queues tbody").replaceChildren(...queues.map((q) =>
      el("tr", {}, el("td", {}, user(q.name)), el("td", { class: "number" }, count(q.waiting)), el("td", {}, q.oldest_s === null ? "" : duration(q.oldest_s)),
        el("td", { "data-of": q.name }, hourOf(q.name)), el("td", { class: "number" }, count(q.processes)), el("td", { class: "number" }, count(q.workers_wanted)), el("td", {}, note(q)))));
    show($("#queues-box"), queues.length > 0);
    show($("#no-queues"), queues.length === 0);
  },
}).start();

// -- The processes -----------------------------------------------------------------------------------------------------

const standing = (process) => {
  if (process.held_s !== null) return `held: it has not answered for ${duration(process.held_s)}`;
  if (!process.alive) return "lost";
  return process.quiet ? "takes no more jobs" : "";
};

new Poller($("[data-processes]").dataset.processes, {
  every: 5000,
  has: "processes",
  onData({ processes }) {
    $("#processes tbody").replaceChildren(...processes.map((p) =>
      el("tr", {}, el("td", {}, user(p.identity)), el("td", {}, user(p.kind)), el("td", { class: "number" }, `${count(p.busy)}/${count(p.concurrency)}`),
        el("td", {}, when(p.started_at)), el("td", {}, user(p.queues.join(", "))), el("td", {}, standing(p)))));
    show($("#processes-box"), processes.length > 0);
    show($("#no-processes"), processes.length === 0);
  },
}).start();

// -- The dead ----------------------------------------------------------------------------------------------------------

const deadUrl = $("[data-dead]").dataset.dead;
const dismissAll = $("#dismiss-all");

const deadJob = (job) => {
  const name = el("bdi", {}, job.job_id);
  return job.tracked ? el("a", { class: "id", href: `${card.dataset.page}/${encodeURIComponent(job.job_id)}` }, name) : name;
};

const dead = new Poller(`${deadUrl}?limit=${PAGE}`, {
  every: 15000,
  has: "entries",
  onData({ entries, total }) {
    setText($("#dead-total"), count(total));
    $("#dead tbody").replaceChildren(...entries.map((job) =>
      el("tr", {}, el("td", {}, deadJob(job)), el("td", {}, user(job.worker ?? "")), el("td", { class: "number" }, job.task_id ?? ""),
        el("td", {}, user(job.error ?? job.error_class ?? "")), el("td", {}, job.at === null ? "" : when(job.at)))));
    show($("#dead-box"), entries.length > 0);
    show($("#no-dead"), entries.length === 0);
    if (dismissAll) show(dismissAll, entries.some((job) => job.tracked));
  },
}).start();

dismissAll?.addEventListener("click", async () => {
  await attempt($("#dead-problem"), dismissAll, () => call(`${deadUrl}/dismiss-all`, { method: "POST", has: "done" }));
  dead.now();
});

// -- The schedules -----------------------------------------------------------------------------------------------------

const plans = $("#schedules-card");
const lines = new Map();

const every = (s) => (/^[\d.]+$/.test(s.schedule) ? duration(Number(s.schedule)) : `${s.schedule} (${s.timezone})`);

const remark = (s) =>
  [!s.enabled && "switched off", !s.declared && "no process declares it", s.skipped > 0 && `${count(s.skipped)} skipped, ${SKIPPED[s.skip_reason]}`, s.error]
    .filter(Boolean).join("; ");

const lastTask = (s) =>
  (s.last_task_id === null ? [] : [el("a", { href: `${plans.dataset.tasks}/${s.last_task_id}` }, `Task ${s.last_task_id}`), ` ${when(s.last_at)}`]);

/** A button of a schedule; the names of all are said to those who cannot see its row. */
function doing(name, word, work) {
  const node = el("button", { type: "button", class: "ghost", "aria-label": `${word}: ${name}` }, word);
  node.addEventListener("click", () => attempt($("#schedules-problem"), node, async () => { await work(); schedules.now(); }));
  return node;
}

function line({ name }) {
  const path = `${plans.dataset.schedules}/${encodeURIComponent(name)}`;
  const turn = (enabled) => () => call(path, { method: "PATCH", body: { enabled }, has: "enabled" });
  const buttons = [
    doing(name, "Run now", () => call(`${path}/run`, { method: "POST", has: "task_id" })),
    doing(name, "Switch off", turn(false)),
    doing(name, "Switch on", turn(true)),
  ];
  const cells = [user(name), "", "", "", user("")].map((text) => el("td", {}, text));
  return { buttons, cells, row: el("tr", {}, cells, "mayOperate" in plans.dataset && el("td", {}, buttons)) };
}

const schedules = new Poller(plans.dataset.schedules, {
  every: 5000,
  has: "schedules",
  onData({ schedules: found }) {
    const names = new Set(found.map((s) => s.name));
    for (const name of lines.keys()) if (!names.has(name)) lines.delete(name);
    const rows = found.map((s) => {
      if (!lines.has(s.name)) lines.set(s.name, line(s));
      const { buttons: [run, off, on], cells, row } = lines.get(s.name);
      setText(cells[1], every(s));
      setText(cells[2], when(s.next_at));
      cells[3].replaceChildren(...lastTask(s));
      setText($(".user", cells[4]), remark(s));
      show(run, s.declared);
      show(off, s.enabled);
      show(on, !s.enabled);
      return row;
    });
    const body = $("#schedules tbody");
    if (rows.length !== body.children.length || rows.some((row, i) => row !== body.children[i])) body.replaceChildren(...rows);
    show(plans, found.length > 0);
  },
}).start();
