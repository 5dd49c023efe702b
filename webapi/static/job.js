// One job: its record, and what can be done about it.

import { Poller, attempt, call, linked } from "./api.js";
import { $, $$, drawBadge, el, setText, show, sure, user } from "./dom.js";
import { STATUSES, count, when } from "./words.js";

const page = $("#job");
const self = page.dataset.job;

const poller = new Poller(self, { every: 2000, has: "job_id", onData: draw, onGone }).start();

function onGone() {
  setText($("#problem"), "This job is not there any more.");
  show($("#problem"), true);
  for (const button of $$("[data-verb]")) show(button, false);
}

function draw(job) {
  page.setAttribute("aria-busy", "false");
  const word = STATUSES[job.status] ?? job.status;
  setText($("#job-title"), job.worker || "Job");
  drawBadge($("#state"), [word, job.status]);
  setText($("#live"), word);
  for (const button of $$("[data-verb]")) show(button, job.actions.includes(button.dataset.verb));
  drawFacts(job);
  drawMessages(job.messages);
  drawError(job);
  setText($("#params"), pretty(job.params));
  setText($("#result"), pretty(job.result));
}

const pretty = (value) => (value === null ? "–" : JSON.stringify(value, null, 2));

// -- What is known -----------------------------------------------------------------------------------------------------

/** How far the job says to be, in units of its own. */
function far(job) {
  if (job.stopping) return "stopping: its worker lets go of it";
  if (job.progress === null) return null;
  const { done, total, percent } = job.progress;
  return total === null ? count(done) : `${count(done)} of ${count(total)}${percent === null ? "" : ` (${percent} %)`}`;
}

/** What the items of a slice came to so far. */
function outcomes(job) {
  const known = Object.entries(job.outcomes).filter(([, number]) => number > 0);
  return known.map(([status, number]) => `${count(number)} ${STATUSES[status] ?? status}`).join(", ") || "none so far";
}

const facts = new Map();

function drawFacts(job) {
  const known = [
    ["Queue", job.queue], ["Attempt", count(job.attempt)], ["Retries", count(job.retries)], ["Sent", when(job.created_at)],
    ["Due", job.due_at && when(job.due_at)], ["Began", when(job.started_at)], ["Ended", when(job.finished_at)],
    ["Process", job.process], ["Progress", far(job)], [job.items > 1 ? "First row" : "Row", job.row === null ? null : count(job.row)],
    ["Items", job.items > 1 ? count(job.items) : null], ["Outcomes", job.items > 1 ? outcomes(job) : null],
    ["Dismissed", job.dismissed ? "yes" : null],
  ];
  for (const [name, value] of known) fact(name, value);
  if (job.task_id !== null && !facts.has("Task")) {
    fact("Task", " ");
    $("dd", facts.get("Task")).replaceChildren(el("a", { href: linked(`${page.dataset.tasks}/${job.task_id}`) }, String(job.task_id)));
  }
}

function fact(name, value) {
  if (!facts.has(name)) {
    facts.set(name, el("div", {}, el("dt", {}, name), el("dd", { dir: "auto" })));
    $("#facts").append(facts.get(name));
  }
  setText($("dd", facts.get(name)), value);
  show(facts.get(name), Boolean(value));
}

let told = "";

function drawMessages(messages) {
  const now = JSON.stringify(messages);
  if (now === told) return; // what somebody has selected or scrolled to stays
  told = now;
  $("#messages tbody").replaceChildren(...messages.map((m) =>
    el("tr", {}, el("td", {}, when(m.at)), el("td", {}, el("span", { class: `badge ${m.status in STATUSES ? m.status : ""}` }, STATUSES[m.status] ?? String(m.status ?? ""))),
      el("td", {}, m.row === undefined ? null : `Row ${count(m.row)}: `, user(m.message)), el("td", { class: "number" }, m.attempt ?? ""))));
  show($("#messages-box"), messages.length > 0);
  show($("#no-messages"), messages.length === 0);
}

/** The error of the last attempt that raised, which a later one may have mended. */
function drawError(job) {
  show($("#error-card"), job.last_error !== null);
  if (job.last_error === null) return;
  setText($("#error"), job.last_error.message);
  setText($("#error-process"), job.last_error.process && `In the process ${job.last_error.process}`);
  show($("#traceback"), job.traceback !== null);
  setText($("#traceback pre"), job.traceback);
}

// -- What can be done --------------------------------------------------------------------------------------------------

const ASKED = {
  kill: ["Give up this job?", "It ends as an error, and can be restarted later.", "Give it up"],
  delete: ["Delete this job?", "It does not run, and ends as cancelled. It cannot be restarted.", "Delete it"],
};

for (const button of $$("[data-verb]")) button.addEventListener("click", () => act(button));

async function act(button) {
  const { verb } = button.dataset;
  if (verb in ASKED && !(await sure(...ASKED[verb]))) return;
  await attempt($("#problem"), button, async () => draw(await call(`${self}/${verb}`, { method: "POST", has: "job_id" })));
  poller.now();
}
