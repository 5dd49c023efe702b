// The queues: what waits in each and who works it, and the jobs of the one that the address names.

import { Poller, call } from "./api.js";
import { sparkline } from "./chart.js";
import { Pages, doing, jobLink, name, taskLink } from "./console.js";
import { $, $$, drawBadge, el, english, moment, plain, rowsOf, setText, show, user, whySkipped } from "./dom.js";
import { parts, t } from "./i18n.js";
import { count, duration, endedInHour, jobs as jobsOf, listed, rate } from "./words.js";

const card = $("#queues-card");
const mayOperate = "mayOperate" in card.dataset;
const api = card.dataset.queues;
const path = (queue) => `${api}/${encodeURIComponent(queue)}`;
const chosen = new URLSearchParams(location.search).get("queue");

/** A picture by queue. */
const hours = new Map();

/** Jobs that the page of the queue lists, and that are deleted with it: those of Tasks are not. */
const single = (q) => q.length + q.tracked;
const SOON_S = 60;
/** Whether it takes long although all threads that Tasks may use are there. */
const isLimited = (q) => q.limited > 0 && q.rate_per_s > 0 && q.waiting / q.rate_per_s > SOON_S;

const waits = (q) => q.waiting + q.length + q.jobs_of_others > 0;
const isStuck = (q) => q.unattended && waits(q);

function state(q) {
  if (q.unattended) return [t("no process works it"), isStuck(q) ? "error" : ""];
  if (q.paused) return [t("paused"), "paused"];
  if (q.workers_wanted > q.processes) return [t("too few workers"), "partial"];
  return isLimited(q) ? [t("limited"), "partial"] : [t("keeps up"), "finished"];
}

/** What a person should know or do: entries of a list. */
function notes(q) {
  const found = [];
  if (isStuck(q) && q.mend) found.push(english(q.mend));
  if (q.unattended && q.paused) found.push(t("It is paused, too."));
  if (q.jobs_of_others) found.push(parts("Jobs of workers that its processes lack: {n} ({workers}).", { n: count(q.jobs_of_others), workers: user(listed(q.other_workers)) }));
  if (!q.unattended && !q.paused && q.workers_wanted <= q.processes && isLimited(q)) {
    found.push(t("It takes about {time}: Tasks limit their jobs at once (parallel), and more processes do not help.", { time: duration(q.waiting / q.rate_per_s) }));
  }
  return found.map((each) => el("li", {}, each));
}

function make(q) {
  const link = el("a", { href: `${card.dataset.page}?queue=${encodeURIComponent(q.name)}#queue`, "aria-current": q.name === chosen && "true" }, el("bdi", {}, q.name));
  const number = () => el("td", { class: "number" });
  const hour = el("td", { "data-of": q.name }, hours.get(q.name) ?? []);
  const row = el("tr", {}, el("td", {}, link), number(), number(), hour, number(), number(), number(), el("td", {}, el("span", { class: "badge" }), el("ul", { class: "notes" })));
  if (mayOperate) row.append(el("td", { class: "actions" }, pausing(q.name), clearing(q.name)));
  return row;
}

function fill(row, q) {
  const texts = [count(q.waiting), q.oldest_s === null ? "–" : duration(q.oldest_s), rate(q.rate_per_s), count(q.workers_wanted), count(q.processes)];
  $$(".number", row).forEach((cell, i) => setText(cell, texts[i]));
  row.classList.toggle("alarm", isStuck(q));
  drawBadge($(".badge", row), state(q));
  const [list, said] = [$(".notes", row), notes(q)];
  if (list.textContent !== said.map((each) => each.textContent).join("")) list.replaceChildren(...said);
  if (!mayOperate) return;
  const [pause, clear] = $(".actions", row).children;
  pause.dataset.paused = String(q.paused);
  name(pause, q.paused ? t("Resume") : t("Pause"), q.name);
  clear.dataset.length = single(q);
  show(pause, q.engine === null);
  show(clear, q.engine === null && single(q) > 0);
}

// -- What can be done --------------------------------------------------------------------------------------------------

function pausing(queue) {
  const node = doing(t("Pause"), queue, async () => {
    const verb = node.dataset.paused === "true" ? "unpause" : "pause";
    await call(`${path(queue)}/${verb}`, { method: "POST", has: "paused" });
    poller.now();
    return verb === "pause" ? t("The queue {queue} is paused: no job of it begins.", { queue }) : t("The queue {queue} goes on.", { queue });
  });
  return node;
}

function clearing(queue) {
  const node = doing(t("Clear…"), queue, async () => {
    const { done } = await call(`${path(queue)}/clear`, { method: "POST", has: "done" });
    poller.now();
    jobs?.now();
    $("a", node.closest("tr"))?.focus();
    return t("{jobs} of the queue {queue} deleted.", { jobs: jobsOf(done), queue });
  }, () => {
    const number = jobsOf(Number(node.dataset.length));
    return [t("Clear this queue?"), t("{jobs} of the queue {queue} will be deleted for good; tracked ones end as cancelled. Jobs of Tasks stay.", { jobs: number, queue }), t("Delete {jobs}", { jobs: number })];
  });
  return node;
}

// -- What ended in the last hour, by queue -----------------------------------------------------------------------------

new Poller(`${card.dataset.history}?by=queue`, {
  every: 60000,
  has: "series",
  onData({ series }) {
    hours.clear();
    for (const { name: queue, finish, failed, error, total } of series) {
      const ended = finish.map((n, i) => n + failed[i] + error[i]);
      hours.set(queue, sparkline(ended, { label: endedInHour(total), bad: error }));
    }
    for (const cell of $$("#queues [data-of]")) cell.replaceChildren(...(hours.has(cell.dataset.of) ? [hours.get(cell.dataset.of)] : []));
  },
}).start();

// -- The queues --------------------------------------------------------------------------------------------------------

const draw = rowsOf($("#queues tbody"), { key: (q) => q.name, make, fill });

const poller = new Poller(api, {
  every: 5000,
  has: "queues",
  onData({ queues }) {
    draw([...queues].sort((a, b) => isStuck(b) - isStuck(a)));
    show($("#queues-box"), queues.length > 0);
    show($("#no-queues"), queues.length === 0);
    if (chosen !== null) drawChosen(queues.find((q) => q.name === chosen) ?? null);
  },
}).start();

// -- The queue that the address names ----------------------------------------------------------------------------------

let jobs = null;

const drawParts = rowsOf($("#parts tbody"), {
  key: (part) => JSON.stringify([part.worker, part.priority]),
  make: (part) => el("tr", {}, el("td", {}, part.worker === null ? t("single jobs") : user(part.worker)), ["", "", ""].map(() => el("td", { class: "number" }))),
  fill(row, part) {
    const texts = [part.priority === null ? "–" : count(part.priority), count(part.waiting), part.oldest_s === null ? "–" : duration(part.oldest_s)];
    texts.forEach((text, i) => setText(row.children[i + 1], text));
  },
});

function drawChosen(q) {
  const isFirst = $("#queue").hidden;
  setText($("#queue-name"), chosen);
  show($("#queue"), true);
  drawParts(q?.backlog ?? []);
  show($("#parts-box"), Boolean(q?.backlog.length));
  show($("#no-parts"), !q?.backlog.length);
  const engine = q?.engine ?? null;
  show($("#kept"), engine !== null);
  if (engine !== null) setText($("#kept"), t("{engine} keeps the jobs of this queue: use its own tools to look at them.", { engine }));
  else jobs ??= listJobs();
  if (isFirst && location.hash === "#queue") $("#queue").focus();
}

function listJobs() {
  const drawJobs = rowsOf($("#queued-jobs tbody"), { key: (job) => job.key, make: jobRow, fill() {} });
  return new Pages(`${path(chosen)}/jobs`, {
    has: "jobs",
    every: 5000,
    box: $("#queued-pager"),
    draw({ jobs: found, total }) {
      setText($("#queued-total"), count(total));
      drawJobs(found);
      show($("#queued"), total > 0);
    },
  });
}

function jobRow(job) {
  const args = job.raw ?? (job.args_cut ? t("(long)") : plain(job.args));
  const row = el("tr", {},
    el("td", {}, job.tracked ? jobLink(job.job_id) : el("bdi", { class: "id" }, job.job_id)), el("td", {}, user(job.worker ?? "")),
    el("td", {}, job.task_id === null ? "" : taskLink(job.task_id)), el("td", {}, user(args)), el("td", {}, moment(job.enqueued_at)));
  if (mayOperate) row.append(el("td", { class: "actions" }, deleting(job)));
  return row;
}

function deleting(job) {
  return doing(t("Delete…"), job.job_id, async () => {
    const { done, skipped } = await call(`${path(chosen)}/delete`, { method: "POST", body: { keys: [job.key] }, has: "done" });
    poller.now();
    jobs.now();
    $("#queue").focus();
    return done ? t("The job {job} is deleted.", { job: job.job_id }) : parts("The job {job} is not deleted: {reason}.", { job: user(job.job_id), reason: whySkipped(skipped[0]) });
  }, () => [t("Delete this job?"), t("It does not run. The item of a Task ends as cancelled."), t("Delete it")]);
}
