// The worker processes, with a square for each thread, and the rates of the registered functions.

import { Poller, attempt, call } from "./api.js";
import { doing, jobLink } from "./console.js";
import { $, $$, drawBadge, el, moment, rowsOf, setText, show, user } from "./dom.js";
import { filled, t, tn } from "./i18n.js";
import { ago, bytes, count, duration, jobs, listed, sentences } from "./words.js";

const card = $("#processes-card");
const mayOperate = "mayOperate" in card.dataset;
const SQUARES = 100;

const isHeld = (p) => p.held_s !== null;
const performs = (p) => p.concurrency > 0;
/** Those that take a signal: an engine's processes are quieted and stopped by the engine's own tools. */
const obeys = (p) => p.alive && (p.kind === "worker" || p.kind === "sidekiq") && !isHeld(p);
const busyThreads = (p) => Math.max(p.busy, p.jobs.length);

function state(p) {
  if (isHeld(p)) return [t("does not answer"), "error"];
  if (!p.alive) return [t("lost"), "error"];
  if (p.quiet) return [t("takes no more jobs"), "paused"];
  if (!performs(p)) return [t("runs"), ""];
  return busyThreads(p) > 0 ? [t("busy"), "running"] : [t("idle"), "finished"];
}

/** What a person should know or do. */
function note(p) {
  if (isHeld(p)) return t("For {time}: a job holds its interpreter, or its machine stopped it. If it stays so, end it with kill -9 {pid} on {host}; its jobs run again elsewhere.", { time: duration(p.held_s), pid: p.pid, host: p.hostname });
  return p.alive ? "" : t("Its jobs are taken over by the others.");
}

// -- Threads -----------------------------------------------------------------------------------------------------------

function threads(p) {
  const running = p.jobs.slice(0, SQUARES).map((job) => ({ key: job.job_id, job, busy: true }));
  const rest = Math.max(0, Math.min(p.concurrency, SQUARES) - running.length);
  return [...running, ...Array.from({ length: rest }, (_, i) => ({ key: `idle ${i}`, job: null, busy: i < busyThreads(p) - running.length }))];
}

const square = ({ job }) => (job === null ? el("li", { class: "thread" }) : el("li", { class: "thread" }, runs(job)));

function runs(job) {
  const link = jobLink(job.job_id);
  link.replaceChildren();
  return link;
}

function fillSquare(node, { job, busy }) {
  node.classList.toggle("busy", busy);
  if (job === null) return;
  const said = t("{worker} {job}, began {time}", { worker: job.worker ?? t("Job"), job: job.job_id, time: job.started_at ? ago(job.started_at) : t("just now") });
  const link = $("a", node);
  link.title = said;
  link.setAttribute("aria-label", said);
}

// -- Processes ---------------------------------------------------------------------------------------------------------

const squares = new WeakMap();

function make(p) {
  const list = el("ul", { class: "threads" });
  const row = el("tr", {},
    el("td", {}, user(p.identity, { class: "user id" }), el("small", { class: "below" }, user([p.kind, p.version, p.hostname && `${p.hostname}, ${p.pid}`].filter(Boolean).join(" · ")))),
    el("td", {}, el("span", { class: "badge" }), el("small", { class: "below" })),
    el("td", {}, performs(p) && [list, el("small", { class: "below" })]),
    el("td", {}), el("td", { class: "number" }), el("td", {}, user("")), el("td", {}, moment(p.started_at)));
  squares.set(row, rowsOf(list, { key: (each) => each.key, make: square, fill: fillSquare }));
  if (mayOperate) row.append(el("td", { class: "actions" }, telling(row, "quiet"), telling(row, "stop")));
  return row;
}

function fill(row, p) {
  const [, standing, at, beat, memory, queues] = row.children;
  known.set(row, p);
  row.classList.toggle("alarm", isHeld(p) || !p.alive);
  drawBadge($(".badge", standing), state(p));
  setText($("small", standing), note(p));
  if (performs(p)) {
    squares.get(row)(threads(p));
    setText($("small", at), t("{n} of {total} busy", { n: count(busyThreads(p)), total: count(p.concurrency) }));
  }
  if ($("time", beat)?.getAttribute("datetime") !== p.beat_at) beat.replaceChildren(moment(p.beat_at));
  setText(memory, p.rss === null ? "–" : bytes(p.rss));
  setText($(".user", queues), listed(p.queues));
  if (!mayOperate) return;
  const [quiet, stop] = $(".actions", row).children;
  show(quiet, obeys(p) && !p.quiet);
  show(stop, obeys(p));
}

// -- What can be done --------------------------------------------------------------------------------------------------

const known = new WeakMap();
const ASKED = {
  quiet: [t("Quiet…"), t("Quiet this process?"), t("{process} runs {jobs} now: it takes no more jobs until it is started anew."), t("Quiet it"), t("{process} takes no more jobs at its next heartbeat.")],
  stop: [t("Stop…"), t("Stop this process?"), t("{process} runs {jobs} now: it ends after its running jobs, and gives back those that last too long."), t("Stop it"), t("{process} stops at its next heartbeat.")],
};

function telling(row, verb) {
  const [word, question, effect, yes, done] = ASKED[verb];
  const identity = $(".id", row).textContent;
  return doing(word, identity, async () => {
    await call(`${card.dataset.processes}/${encodeURIComponent(identity)}/${verb}`, { method: "POST", has: "signal" });
    poller.now();
    return filled(done, { process: identity });
  }, () => [question, filled(effect, { process: identity, jobs: jobs(busyThreads(known.get(row))) }), yes]);
}

const draw = rowsOf($("#processes tbody"), { key: (p) => p.identity, make, fill });
const urgency = (p) => (isHeld(p) ? 0 : !p.alive ? 1 : performs(p) ? 2 : 3);

function summary(processes) {
  const held = processes.filter(isHeld).length;
  const silent = held > 0 && tn("{n} process does not answer.", "{n} processes do not answer.", held);
  const working = processes.filter((p) => performs(p) && p.alive && !isHeld(p));
  return sentences(silent, summaryOf(working));
}

function summaryOf(working) {
  if (working.length === 0) return t("No process performs jobs. Start a worker: asynctask -A module:app worker");
  const busy = working.reduce((sum, p) => sum + busyThreads(p), 0);
  const all = working.reduce((sum, p) => sum + p.concurrency, 0);
  const values = { processes: tn("{n} process", "{n} processes", working.length), threads: tn("{n} thread", "{n} threads", all) };
  return tn("{processes} with {threads}, of which {n} is busy.", "{processes} with {threads}, of which {n} are busy.", busy, values);
}

const poller = new Poller(card.dataset.processes, {
  every: 3000,
  has: "processes",
  onData({ processes }) {
    draw([...processes].sort((a, b) => urgency(a) - urgency(b)));
    setText($("#summary"), summary(processes));
    show($("#summary"), processes.length > 0);
    show($("#processes-box"), processes.length > 0);
    show($("#no-processes"), processes.length === 0);
  },
}).start();

// -- The registered functions: their limits as they are now, which an operator sets ------------------------------------

const limited = $$("#functions [data-limit]");

/** What there is to say of a limit beside its rate. */
function about(limit) {
  const parts = [];
  if (limit.rate !== limit.declared) parts.push(t("the code says {rate}", { rate: limit.declared }));
  if (limit.workers.length > 1) parts.push(t("shared by {n} functions", { n: count(limit.workers.length) }));
  if (limit.next_at) parts.push(t("next start {time}", { time: ago(limit.next_at) }));
  return parts;
}

function drawLimit(cell, limit) {
  if (!mayOperate) {
    setText(cell, [limit.rate, ...about(limit)].join(t("; ")));
    return;
  }
  if ($("form", cell) === null) cell.replaceChildren(setter(limit.name), el("small", { class: "below" }));
  const field = $("input", cell);
  if (field.value === field.defaultValue) field.value = limit.rate; // else somebody is typing
  field.defaultValue = limit.rate;
  setText($("small", cell), about(limit).join(t("; ")));
}

function setter(limit) {
  const field = el("input", { type: "text", required: true, maxlength: 32, autocomplete: "off", spellcheck: "false", "aria-label": t("Rate of {limit}", { limit }) });
  const button = el("button", { class: "ghost", "aria-label": t("Set the rate of {limit}", { limit }) }, t("Set"));
  const form = el("form", { class: "rate" }, field, button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    setText($("#rate-said"), "");
    const done = await attempt($("#rate-problem"), button, async () => {
      const now = await call(`${card.dataset.rates}/${encodeURIComponent(limit)}`, { method: "PATCH", body: { rate: field.value.trim() }, has: "rate" });
      field.value = field.defaultValue = now.rate;
    });
    if (!done) return;
    setText($("#rate-said"), t("{limit}: {rate} from now on, in all processes.", { limit, rate: field.value }));
    rates.now();
  });
  return form;
}

const rates = new Poller(card.dataset.rates, {
  every: 5000,
  has: "rates",
  onData({ rates: found }) {
    for (const cell of limited) {
      const limit = found.find(({ name }) => name === cell.dataset.limit);
      if (limit !== undefined) drawLimit(cell, limit);
    }
  },
});
if (limited.length > 0) rates.start();
