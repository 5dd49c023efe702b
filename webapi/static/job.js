// One job: its record, and what can be done about it.

import { Poller, attempt, call, linked } from "./api.js";
import { $, $$, drawBadge, drawFacts, drawMixed, el, mixed, moment, setText, show, sure, user } from "./dom.js";
import { parts, t, tn } from "./i18n.js";
import { STATUSES, count, duration, heard, listed, own, percents } from "./words.js";

const page = $("#job");
const self = page.dataset.job;

const poller = new Poller(self, { every: 2000, has: "job_id", onData: draw, onGone }).start();

function onGone() {
  setText($("#problem"), t("This job is not there any more."));
  show($("#problem"), true);
  for (const button of $$("[data-verb]")) show(button, false);
}

function draw(job) {
  page.setAttribute("aria-busy", "false");
  const word = STATUSES[job.status] ?? job.status;
  setText($("#job-title"), job.worker || t("Job"));
  drawBadge($("#state"), [word, job.status]);
  setText($("#live"), word);
  for (const button of $$("[data-verb]")) show(button, job.actions.includes(button.dataset.verb));
  // What waits for its time has not run yet, or waits for a retry: the same action has another word.
  const restart = $("[data-verb=restart]");
  if (restart) setText(restart, job.status === "enqueue" ? t("Run now") : t("Restart"));
  drawBeside(job);
  drawFacts($("#facts"), facts(job));
  drawAttempts(job);
  drawMessages(job.messages);
  drawError(job);
  setText($("#params"), pretty(job.params));
  setText($("#result"), pretty(job.result));
}

const pretty = (value) => (value === null ? "–" : JSON.stringify(value, null, 2));

// -- What is known -----------------------------------------------------------------------------------------------------

/** How far the job says to be, in units of its own. */
function far(job) {
  if (job.stopping) return t("stopping: its worker lets go of it");
  if (job.progress === null) return null;
  const { done, total, percent } = job.progress;
  if (total === null) return count(done);
  const values = { done: count(done), total: count(total), percent: percent === null ? "" : percents(Math.floor(percent)) };
  return percent === null ? t("{done} of {total}", values) : t("{done} of {total} ({percent})", values);
}

/** What the items of a slice came to so far. */
function outcomes(job) {
  const known = Object.entries(job.outcomes).filter(([, number]) => number > 0);
  return listed(known.map(([status, number]) => `${count(number)} ${STATUSES[status] ?? status}`)) || t("none so far");
}

const facts = (job) => [
  [t("Queue"), job.queue], [t("Attempt"), count(job.attempt)], [t("Retries"), count(job.retries)], [t("Sent"), moment(job.created_at)],
  [t("Due"), job.due_at && moment(job.due_at)], [t("Began"), moment(job.started_at)], [t("Ended"), moment(job.finished_at)],
  [t("Process"), job.process], [t("Progress"), far(job)], [job.items > 1 ? t("First row") : t("Row"), job.row === null ? null : count(job.row)],
  [t("Items"), job.items > 1 ? count(job.items) : null], [t("Outcomes"), job.items > 1 ? outcomes(job) : null],
  [t("Dismissed"), job.dismissed ? t("yes") : null], [t("Task"), job.task_id === null ? null : itsTask(job)],
];

/** Links to its Task, and to its row there. */
function itsTask(job) {
  const task = linked(`${page.dataset.tasks}/${job.task_id}`);
  const link = el("a", { href: task }, t("Task {task}", { task: job.task_id }));
  return job.row === null ? [link] : [link, t(", "), el("a", { href: `${task}#rows?from=${job.id}` }, t("row {row} in its table", { row: count(job.row) }))];
}

/** The failed jobs of its Task before and behind it. */
function drawBeside(job) {
  for (const [id, other] of [["previous-failed", job.previous_failed], ["next-failed", job.next_failed]]) {
    const link = $(`#${id}`);
    show(link, other !== null);
    if (other !== null) link.href = linked(`${document.body.dataset.page}jobs/${encodeURIComponent(other)}`);
  }
  show($("#beside"), job.previous_failed !== null || job.next_failed !== null);
}

// -- The attempts ------------------------------------------------------------------------------------------------------

const time = (text) => Date.parse(text);

/** The attempts of a job from its messages: when each could have begun, began, and ended, and how. */
function attempts(job) {
  const found = [];
  let since = job.created_at;
  let now = null;
  for (const m of job.messages) {
    if (m.row !== undefined || typeof m.at !== "string") continue; // of an item of a slice
    if (m.status === "working") {
      if (now !== null) { // a word of the job itself, or its engine has delivered it to another process
        now.process = m.process ?? now.process;
        continue;
      }
      now = { number: m.attempt, since, began: m.at, ended: null, status: "working", process: m.process };
      found.push(now);
    } else if (now !== null) {
      Object.assign(now, { ended: m.at, status: m.status });
      [since, now] = [m.at, null];
    }
  }
  return found;
}

let drawn = "";

function drawAttempts(job) {
  const found = attempts(job);
  const state = JSON.stringify([found, job.due_at, job.status]);
  if (state === drawn && job.status !== "working") return;
  drawn = state;
  show($("#attempts-card"), found.length > 0);
  const end = Math.max(...found.map((each) => (each.ended === null ? Date.now() : time(each.ended))));
  const begin = time(job.created_at);
  const share = (ms) => `${(100 * Math.max(0, ms)) / Math.max(1, end - begin)}%`;
  $("#attempts tbody").replaceChildren(...found.map((each) => {
    const until = each.ended === null ? Date.now() : time(each.ended);
    const [waited, ran] = [el("span", { class: "waited" }), el("span", { class: `ran ${each.status}` })];
    Object.assign(waited.style, { marginInlineStart: share(time(each.since) - begin), width: share(time(each.began) - time(each.since)) });
    ran.style.width = share(until - time(each.began));
    return el("tr", {}, el("td", { class: "number" }, count(each.number)),
      el("td", {}, duration((time(each.began) - time(each.since)) / 1000)), el("td", {}, moment(each.began)),
      el("td", {}, duration((until - time(each.began)) / 1000)),
      el("td", {}, el("span", { class: `badge ${each.status}` }, STATUSES[each.status] ?? each.status)),
      el("td", {}, each.process ? user(each.process) : null),
      el("td", { class: "span", "aria-hidden": "true" }, el("div", {}, waited, ran)));
  }));
  const waits = job.status === "enqueue" && job.due_at !== null && found.length > 0;
  show($("#next-attempt"), waits);
  if (!waits) return;
  if (time(job.due_at) > Date.now()) $("#next-attempt").replaceChildren(...parts("The next attempt is due: {time}.", { time: moment(job.due_at) }));
  else setText($("#next-attempt"), t("The next attempt is due and waits for a worker."));
}

let messagesDrawn = "";

function drawMessages(messages) {
  const now = JSON.stringify(messages);
  if (now === messagesDrawn) return; // what somebody has selected or scrolled to stays
  messagesDrawn = now;
  $("#messages tbody").replaceChildren(...messages.map((m) =>
    el("tr", {}, el("td", {}, moment(m.at)), el("td", {}, el("span", { class: `badge ${m.status in STATUSES ? m.status : ""}` }, STATUSES[m.status] ?? String(m.status ?? ""))),
      el("td", {}, m.row === undefined ? null : t("Row {row}: ", { row: count(m.row) }), mixed("span", heard(m.message ?? ""))), el("td", { class: "number" }, m.attempt ?? ""))));
  show($("#messages-box"), messages.length > 0);
  show($("#no-messages"), messages.length === 0);
}

/** The error of the last attempt that raised, which a later one may have mended. */
function drawError(job) {
  show($("#error-card"), job.last_error !== null);
  if (job.last_error === null) return;
  setText($("#error"), job.last_error.message);
  const { process } = job.last_error;
  drawMixed($("#error-process"), process ? t("In the process {process}", { process: own(process) }) : "");
  show($("#traceback"), job.traceback !== null);
  if (job.traceback !== null && job.traceback !== traced) $("#traceback .trace").replaceChildren(...folded(job.traceback));
  traced = job.traceback;
}

let traced = null;

const FRAME = /^ {2}File "([^"]+)", line \d+/;
const LIBRARY = /[/\\](site-packages|dist-packages|asynctask)[/\\]|[/\\]lib[/\\]python[\d.]+[/\\]|^<frozen /;

/** The lines of a traceback; runs of frames of libraries are folded. One of another language has none. */
function folded(text) {
  const parts = [];
  for (const line of text.split("\n")) {
    const frame = FRAME.exec(line);
    const goes = frame === null && line.startsWith("    ") && parts.length > 0; // belongs to the frame above
    const library = frame !== null ? LIBRARY.test(frame[1]) : goes && parts.at(-1).library;
    if (parts.length === 0 || parts.at(-1).library !== library) parts.push({ library, lines: [], frames: 0 });
    parts.at(-1).lines.push(line);
    if (frame !== null) parts.at(-1).frames += 1;
  }
  return parts.map(({ library, lines, frames }) => {
    const words = el("pre", {}, lines.join("\n"));
    return library ? el("details", {}, el("summary", {}, tn("{n} frame of a library", "{n} frames of libraries", frames)), words) : words;
  });
}

// -- What can be done --------------------------------------------------------------------------------------------------

const ASKED = {
  kill: [t("Give up this job?"), t("It ends as an error, and can be restarted later."), t("Give it up")],
  delete: [t("Delete this job?"), t("It does not run, and ends as cancelled. It cannot be restarted."), t("Delete it")],
};

for (const button of $$("[data-verb]")) button.addEventListener("click", () => act(button));

async function act(button) {
  const { verb } = button.dataset;
  if (verb in ASKED && !(await sure(...ASKED[verb]))) return;
  await attempt($("#problem"), button, async () => draw(await call(`${self}/${verb}`, { method: "POST", has: "job_id" })));
  poller.now();
}
