// The overview: what happens now, and the Tasks. Group and filters are in the address, so that a link leads to them.

import { Poller, attempt, call } from "./api.js";
import { sparkline } from "./chart.js";
import { $, drawBadge, drawBar, drawMixed, el, moment, setText, show, user } from "./dom.js";
import { t, tn } from "./i18n.js";
import { amount, badge, count, duration, listed, own, pace, percent, problems, rate, reached, remark, rows, segments, sentence } from "./words.js";

const PAGE = 20;
const HOUR_MS = 3_600_000;
const WITHIN_H = { hour: 1, day: 24, week: 168, month: 720 };

// -- What happens now --------------------------------------------------------------------------------------------------

const now = $("#now");

/** A figure, its note, and whether it is bad. */
function figure(name, value, note = "", bad = false) {
  const tile = $(`#now-${name}`);
  setText($("strong", tile), value);
  drawMixed($("small", tile), note || "");
  tile.classList.toggle("bad", bad);
}

function drawQueues({ queues }) {
  const waiting = queues.reduce((sum, queue) => sum + queue.waiting, 0);
  const left = queues.filter((queue) => queue.unattended && queue.waiting > 0).map((queue) => queue.name);
  const oldest = Math.max(0, ...queues.map((queue) => queue.oldest_s ?? 0));
  const unattended = tn("no process works the queue {queues}", "no process works the queues {queues}", left.length, { queues: listed(left.map(own)) });
  figure("waiting", count(waiting), left.length ? unattended : oldest >= 1 ? t("the oldest for {time}", { time: duration(oldest) }) : "", left.length > 0);
}

function drawProcesses({ processes }) {
  const performing = processes.filter((process) => process.concurrency > 0);
  const live = performing.filter((process) => process.alive && process.held_s === null);
  const sum = (name) => live.reduce((total, process) => total + process[name], 0);
  figure("running", count(sum("busy")), t("of {n} at once", { n: count(sum("concurrency")) }));
  const lost = performing.length - live.length;
  figure("workers", count(live.length), lost ? t("{n} do not answer", { n: count(lost) }) : "", lost > 0 || live.length === 0);
}

const MINUTES = 5;

function trend(name, values, bad, label) {
  $(`#now-${name} .trend`).replaceChildren(sparkline(values, { label, bad }));
}

function drawHistory({ series: [all], until, running, processes }) {
  const failed = all ? all.failed.map((n, i) => n + all.error[i]) : [];
  const ended = failed.map((n, i) => n + all.finish[i]);
  const recent = ended.slice(-MINUTES).reduce((sum, n) => sum + n, 0);
  const ahead = Math.min(60, Math.max(0, (new Date(until) - Date.now()) / 1000)); // of the minute that is not over
  figure("rate", rate(recent / (60 * MINUTES - ahead)), t("in the last {n} minutes", { n: MINUTES }));
  const total = failed.reduce((sum, n) => sum + n, 0);
  figure("failures", count(total), total && t("of {rows}", { rows: rows(ended.reduce((sum, n) => sum + n, 0)) }));
  trend("running", running, [], t("Jobs that ran in each minute of the last hour"));
  trend("workers", processes, [], t("Worker processes in each minute of the last hour"));
  if (!all) return;
  trend("rate", ended, failed, t("Rows that ended in each minute of the last hour"));
  trend("failures", failed, failed, t("Rows that failed in each minute of the last hour"));
  trend("waiting", all.waiting, [], t("Jobs that waited in each minute of the last hour"));
}

if (now) {
  new Poller(now.dataset.history, { every: 30_000, has: "series", onData: drawHistory }).start();
  new Poller(now.dataset.queues, { every: 5000, has: "queues", onData: drawQueues }).start();
  new Poller(now.dataset.processes, { every: 5000, has: "processes", onData: drawProcesses }).start();
}

// -- The Tasks ---------------------------------------------------------------------------------------------------------

const body = $("#tasks tbody");

/** The rows that are shown, by Task: the row, the last answer, and whether its earlier attempts are shown. */
const shown = new Map();
let older = null;

function first() {
  const asked = new URLSearchParams(location.search);
  const query = new URLSearchParams({ limit: PAGE });
  for (const name of ["group", "worker", "owner"]) if (asked.get(name)) query.set(name, asked.get(name));
  const hours = WITHIN_H[asked.get("within")];
  if (hours) query.set("since", new Date(Date.now() - hours * HOUR_MS).toISOString());
  return `${document.body.dataset.api}?${query}`;
}

const named = (p) => p.title || t("Task {task}", { task: p.task_id });

function entry(p) {
  const bar = el("div", { class: "bar thin", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" });
  const fold = el("button", { type: "button", class: "ghost fold", "aria-expanded": "false", hidden: true });
  const row = el("tr", {},
    el("td", {}, el("a", { class: "task-title", href: p.links.ui }, user("")), el("small", { class: "about-task" }, user("")), fold),
    el("td", {}, el("span", { class: "badge" })),
    el("td", { class: "far" }, bar, el("small", {})),
    el("td", { class: "bad-rows" }),
    el("td", {}), el("td", {}, p.owner && user(p.owner)), el("td", {}, moment(p.created_at)));
  const found = { row, bar, fold, p, open: false };
  fold.addEventListener("click", () => {
    found.open = !found.open;
    arrange();
  });
  return found;
}

function fill({ row, bar }, p) {
  setText($(".task-title .user", row), named(p));
  setText($(".about-task .user", row), `#${p.task_id} · ${p.worker}`);
  drawBadge($(".badge", row), badge(p));
  bar.setAttribute("aria-label", named(p));
  drawBar(bar, segments(p), { percent: reached(p), text: `${percent(p)}, ${sentence(p)}` });
  drawMixed($(".far small", row), [amount(p), remark(p)].filter(Boolean).join(" · "));
  const bad = problems(p);
  const cell = $(".bad-rows", row);
  if (cell.dataset.said !== JSON.stringify(bad)) {
    cell.dataset.said = JSON.stringify(bad);
    cell.replaceChildren(...bad.map(([kind, text]) => el("span", { class: `rows-${kind}` }, text)));
  }
  setText(row.children[4], pace(p));
}

/** Behind which Task one is folded: behind its newest correction, or if it is a correction that was not accepted, behind what that was of. */
function foldedUnder({ resubmitted_by: corrections, state, resubmit_of: corrected }) {
  return Math.max(0, ...[...corrections, ...(state === "rejected" && corrected !== null ? [corrected] : [])].filter((id) => shown.has(id)));
}

/** Puts the rows in order: the newest first, and what another Task corrects, or was no correction, behind that, folded. */
function arrange() {
  const under = new Map();
  const top = [];
  for (const found of [...shown.values()].sort((a, b) => b.p.task_id - a.p.task_id)) {
    const by = foldedUnder(found.p);
    if (by) under.set(by, [...(under.get(by) ?? []), found]);
    else top.push(found);
  }
  const order = [];
  const place = (found, depth, visible) => {
    const earlier = under.get(found.p.task_id) ?? [];
    found.row.classList.toggle("earlier", depth > 0);
    show(found.row, visible);
    show(found.fold, earlier.length > 0);
    found.fold.setAttribute("aria-expanded", String(found.open));
    const areEarlier = earlier.every((each) => each.p.task_id < found.p.task_id);
    setText(found.fold, areEarlier ? tn("{n} earlier attempt", "{n} earlier attempts", earlier.length) : tn("{n} other attempt", "{n} other attempts", earlier.length));
    order.push(found.row);
    for (const each of earlier) place(each, depth + 1, visible && found.open);
  };
  for (const found of top) place(found, 0, true);
  order.forEach((row, i) => body.children[i] !== row && body.insertBefore(row, body.children[i] ?? null));
  show($("#no-tasks"), order.length === 0);
}

function take(tasks) {
  for (const p of tasks) {
    if (!shown.has(p.task_id)) shown.set(p.task_id, entry(p));
    const found = shown.get(p.task_id);
    found.p = p;
    fill(found, p);
  }
}

/** Takes out what is in the range of the first page, and not in it any more. */
function drop({ tasks, links }) {
  const there = new Set(tasks.map((p) => p.task_id));
  const last = links.next === null ? 0 : tasks.at(-1).task_id;
  for (const [id, { row }] of shown) {
    if (id < last || there.has(id)) continue;
    row.remove();
    shown.delete(id);
  }
}

const showOlder = () => show($("#older"), Boolean(older));

new Poller(first(), {
  every: 2000,
  has: "tasks",
  onData(page) {
    $("#tasks").setAttribute("aria-busy", "false");
    drop(page);
    take(page.tasks);
    arrange();
    if (older === null) older = page.links.next ?? "";
    showOlder();
  },
}).start();

$("#older").addEventListener("click", () => attempt($("#older-problem"), $("#older"), async () => {
  const page = await call(older, { has: "tasks" });
  take(page.tasks);
  arrange();
  older = page.links.next ?? "";
  showOlder();
}));
