// The schedules of periodic tasks, and the deliveries of webhooks.

import { Poller, call } from "./api.js";
import { doing, jobLink, name, taskLink } from "./console.js";
import { $, drawBadge, drawMixed, el, moment, rowsOf, setText, show, user } from "./dom.js";
import { t, tn } from "./i18n.js";
import { CALLED, count, duration, heard, skipped } from "./words.js";

// -- Schedules ---------------------------------------------------------------------------------------------------------

const card = $("#schedules-card");
const mayOperate = "mayOperate" in card.dataset;

const every = (s) => (/^[\d.]+$/.test(s.schedule) ? duration(Number(s.schedule)) : `${s.schedule} (${s.timezone})`);

const remark = (s) =>
  [!s.enabled && t("switched off"), !s.declared && t("no process declares it"), s.skipped > 0 && skipped(s.skipped, s.skip_reason)]
    .filter(Boolean).join(t("; "));

const last = (s) => (s.last_task_id === null ? [] : [taskLink(s.last_task_id), " ", moment(s.last_at)]);

function make(s) {
  const row = el("tr", {}, el("td", {}, user(s.name)), el("td", {}, user(s.worker)), el("td"), el("td"), el("td"), el("td", {}, el("span"), user("", { class: "user below" })));
  if (mayOperate) row.append(el("td", { class: "actions" }, starting(s.name), switching(s.name)));
  return row;
}

function fill(row, s) {
  const [, , times, next, before, noted] = row.children;
  setText(times, every(s));
  if (next.dataset.at !== String(s.next_at)) next.replaceChildren(moment(s.next_at));
  next.dataset.at = String(s.next_at);
  if (before.dataset.at !== `${s.last_task_id} ${s.last_at}`) before.replaceChildren(...last(s));
  before.dataset.at = `${s.last_task_id} ${s.last_at}`;
  setText(noted.firstChild, remark(s));
  setText(noted.lastChild, s.error);
  row.classList.toggle("alarm", s.error !== null || (s.enabled && !s.declared));
  if (!mayOperate) return;
  const [run, turn] = $(".actions", row).children;
  show(run, s.declared);
  turn.dataset.enabled = String(s.enabled);
  name(turn, s.enabled ? t("Switch off") : t("Switch on"), s.name);
}

const path = (schedule) => `${card.dataset.schedules}/${encodeURIComponent(schedule)}`;

const starting = (schedule) => doing(t("Run now"), schedule, async () => {
  const { task_id: task } = await call(`${path(schedule)}/run`, { method: "POST", has: "task_id" });
  schedules.now();
  return t("Task {task} is submitted.", { task });
});

function switching(schedule) {
  const node = doing(t("Switch off"), schedule, async () => {
    const enabled = node.dataset.enabled !== "true";
    await call(path(schedule), { method: "PATCH", body: { enabled }, has: "enabled" });
    schedules.now();
    return enabled ? t("{schedule} is switched on.", { schedule }) : t("{schedule} is switched off.", { schedule });
  });
  return node;
}

const draw = rowsOf($("#schedules tbody"), { key: (s) => s.name, make, fill });

const schedules = new Poller(card.dataset.schedules, {
  every: 5000,
  has: "schedules",
  onData({ schedules: found }) {
    draw(found);
    show($("#schedules-box"), found.length > 0);
    show($("#no-schedules"), found.length === 0);
  },
}).start();

// -- Webhooks: a delivery is a job whose arguments are the URL and the progress object ------------------------------------

const DELIVERY = "webhook-";

/** The host of a delivery's URL; of an empty one it is that of the settings. */
function host(job) {
  try {
    return job.params[0] ? new URL(job.params[0]).host : t("the setting's URL");
  } catch {
    return "–";
  }
}

function makeDelivery(job) {
  const task = job.params?.[1]?.task_id;
  return el("tr", {}, el("td", {}, jobLink(job.job_id)), el("td", {}, user(host(job))), el("td", {}, Number.isSafeInteger(task) ? taskLink(task) : ""),
    el("td", {}, el("span", { class: "badge" })), el("td", { class: "number" }), el("td"), el("td", {}, moment(job.created_at)));
}

const failed = (job) => ["error", "failed"].includes(job.status) && !job.dismissed;

const drawDeliveries = rowsOf($("#deliveries tbody"), {
  key: (job) => job.job_id,
  make: makeDelivery,
  fill(row, job) {
    drawBadge($(".badge", row), job.status === "enqueue" && job.retries > 0 ? [t("tried again later"), "paused"] : [CALLED[job.status] ?? job.status, job.status]);
    setText(row.children[4], count(job.attempt));
    const latest = job.messages.findLast((each) => each.status === "error") ?? job.messages.at(-1);
    drawMixed(row.children[5], heard(latest?.message ?? ""));
  },
});

new Poller($("#webhooks-card").dataset.deliveries, {
  every: 15000,
  has: "jobs",
  onData({ jobs }) {
    const deliveries = jobs.filter((job) => job.job_id.startsWith(DELIVERY));
    const bad = deliveries.filter(failed).length;
    drawDeliveries(deliveries);
    show($("#failing"), bad > 0);
    if (bad > 0) setText($("#failing"), tn("{n} of the last {total} deliveries failed. Open it to see why and to send it again.", "{n} of the last {total} deliveries failed. Open one to see why and to send it again.", bad, { total: count(deliveries.length) }));
    show($("#deliveries-box"), deliveries.length > 0);
    show($("#no-deliveries"), deliveries.length === 0);
  },
}).start();
