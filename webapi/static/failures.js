// What fails across Tasks: the templates of the errors, and the jobs of the chosen list.

import { Poller, call } from "./api.js";
import { sparkline } from "./chart.js";
import { Pages, doing, jobLink, name, taskLink } from "./console.js";
import { $, $$, el, mixed, moment, plain, rowsOf, setText, show, user, whySkipped } from "./dom.js";
import { parts, t } from "./i18n.js";
import { count, heard, jobs as jobsOf, listed, portion, saidBy } from "./words.js";

const page = $("#failures");
const { api, list } = page.dataset;
const mayOperate = "mayOperate" in page.dataset;
const FIRST = 10;

const [ownTotal, ...otherTotals] = $$("[data-total]").sort((a, b) => (b.dataset.total === api) - (a.dataset.total === api));

for (const badge of otherTotals) {
  const onData = ({ total }) => {
    setText(badge, count(total));
    if (badge.dataset.list === "dead") drawNavigation(total);
  };
  new Poller(`${badge.dataset.total}?limit=1`, { every: 30000, has: "total", onData }).start();
}

/** The entry of the navigation has the number of dead jobs, as `Entry.text` of pages.py says it. */
function drawNavigation(total) {
  setText($('header [aria-current="page"]'), total ? t("Failures ({n})", { n: count(total) }) : t("Failures"));
}

// -- By template -------------------------------------------------------------------------------------------------------

const known = new WeakMap();

function make() {
  const row = el("tr", {}, el("td", {}, user(""), el("small", { class: "below" })), el("td", { class: "number" }, el("strong"), el("small", { class: "below" })),
    el("td"), el("td"), el("td"), el("td", {}, el("span", { class: "links" }), el("small", { class: "below" }, user(""))));
  if (mayOperate) row.append(el("td", { class: "actions" }, running(row, FIRST), running(row, null), list === "dead" && dismissing(row)));
  return row;
}

function fill(row, { template, jobs }) {
  const [error, number, trend, first, last, where] = row.children;
  const before = known.get(row);
  known.set(row, template);
  setText($(".user", error), saidBy(template));
  if (before?.sample_job_id !== template.sample_job_id) $("small", error).replaceChildren(...sample(template));
  setText($("strong", number), count(template.count));
  setText($("small", number), portion(template.count, jobs));
  drawTrend(trend, template.hours);
  drawTime(first, template.first_at);
  drawTime(last, template.last_at);
  drawWhere(where, template, before);
  if (mayOperate) drawActions($$("button", row), template);
}

const sample = ({ sample_job_id: job }) => (job === null ? [] : parts("For instance {job}", { job: jobLink(job) }));

function drawTrend(cell, hours) {
  const said = t("In the last hour: {last}. In the hour before: {before}.", { last: count(hours.at(-1)), before: count(hours.at(-2)) });
  if (cell.dataset.hours === hours.join()) return;
  cell.dataset.hours = hours.join();
  cell.replaceChildren(sparkline(hours, { label: said }), el("small", { class: "below" }, said));
}

function drawTime(cell, at) {
  if ($("time", cell)?.getAttribute("datetime") !== at) cell.replaceChildren(moment(at));
}

function drawWhere(cell, { tasks, task_count: total, workers }, before) {
  const shown = tasks.slice(0, 3);
  if (before?.tasks.slice(0, 3).join() !== shown.join() || before.task_count !== total) {
    const more = total > shown.length ? t("and {n} more", { n: count(total - shown.length) }) : null;
    $(".links", cell).replaceChildren(...[...shown.map(taskLink), more].filter(Boolean).flatMap((each) => [each, " "]));
  }
  setText($(".user", cell), listed(workers));
}

function drawActions([first, all, dismiss], template) {
  const about = saidBy(template);
  show(first, template.count > FIRST);
  name(first, t("Run {n} first", { n: FIRST }), about);
  name(all, template.count === 1 ? t("Run it") : t("Run all"), about);
  if (dismiss) name(dismiss, template.count === 1 ? t("Dismiss…") : t("Dismiss all…"), about);
}

/** An entry of `skipped` may stand for all jobs of a Task: what was not done is the rest of the `asked`. */
const skipping = (skipped, asked, done) => (skipped.length === 0 ? [] :
  [" ", ...parts("Not done: {jobs}, because: {reason}.", { jobs: jobsOf(Math.max(skipped.length, asked - done)), reason: whySkipped(skipped[0]) })]);

function acting(row, word, verb, first, asked) {
  return doing(word, "", async () => {
    const { id, count: all } = known.get(row);
    const url = `${api}/templates/${id}/${verb}${first === null ? "" : `?first=${first}`}`;
    const { done, skipped } = await call(url, { method: "POST", has: "done" });
    after();
    const said = verb === "restart" ? t("{jobs} started again.", { jobs: jobsOf(done) }) : t("{jobs} dismissed.", { jobs: jobsOf(done) });
    return [said, ...skipping(skipped, Math.min(first ?? all, all), done)];
  }, asked && (() => asked(jobsOf(known.get(row).count))));
}

const running = (row, first) => acting(row, t("Run all"), "restart", first, null);
const dismissing = (row) =>
  acting(row, t("Dismiss all…"), "dismiss", null, (number) => [
    t("Dismiss the jobs of this error?"), t("{jobs} will leave the list. The outcome stays recorded.", { jobs: number }), t("Dismiss {jobs}", { jobs: number }),
  ]);

/** Shows what is left. */
async function after() {
  jobs.now();
  if (drawTemplates) await refresh();
}

const drawTemplates = $("#templates") && rowsOf($("#templates tbody"), { key: ({ template }) => template.id, make, fill });

function showTemplates({ templates: found, jobs: number, complete }) {
  drawTemplates(found.map((template) => ({ template, jobs: number })));
  show($("#templates-box"), found.length > 0);
  show($("#incomplete"), !complete);
}

const refresh = async () => showTemplates(await call(`${api}/templates`, { has: "templates" }));

if (drawTemplates) new Poller(`${api}/templates`, { every: 30000, has: "templates", onData: showTemplates }).start();

// -- One by one --------------------------------------------------------------------------------------------------------

const dismissAll = $("#dismiss-all");

function jobRow(job) {
  const args = job.raw ?? (job.args_cut ? t("(long)") : plain(job.args));
  const row = el("tr", {},
    el("td", {}, job.tracked ? jobLink(job.job_id) : el("bdi", { class: "id" }, job.job_id)), el("td", {}, user(job.worker ?? "")),
    el("td", {}, job.task_id === null ? "" : taskLink(job.task_id)), list === "scheduled" ? el("td", {}, user(args)) : mixed("td", heard(job.error ?? job.error_class ?? "")),
    el("td", { class: "number" }, count(job.retries)), el("td", {}, moment(job.at)));
  if (mayOperate) row.append(el("td", { class: "actions" }, doing(t("Run now"), job.job_id, () => restart(job))));
  return row;
}

async function restart(job) {
  const { done, skipped } = await call(`${api}/restart`, { method: "POST", body: { keys: [job.key] }, has: "done" });
  await after();
  return done ? t("The job {job} is started again.", { job: job.job_id }) : parts("The job {job} is not started: {reason}.", { job: user(job.job_id), reason: whySkipped(skipped[0]) });
}

const drawJobs = rowsOf($("#jobs tbody"), { key: (job) => job.key, make: jobRow, fill() {} });

const jobs = new Pages(api, {
  has: "entries",
  every: 10000,
  box: $("#pager"),
  draw({ entries, total }) {
    setText($("#total"), count(total));
    setText(ownTotal, count(total));
    if (list === "dead") drawNavigation(total);
    drawJobs(entries);
    show($("#jobs-box"), total > 0);
    show($("#no-jobs"), total === 0);
    if (dismissAll) show(dismissAll, entries.some((job) => job.tracked));
  },
});

if (dismissAll) {
  dismissAll.append(doing(t("Dismiss all…"), t("dead jobs"), async () => {
    const { done } = await call(`${api}/dismiss-all`, { method: "POST", has: "done" });
    await after();
    return t("{jobs} dismissed.", { jobs: jobsOf(done) });
  }, () => {
    const number = $("#total").textContent;
    return [t("Dismiss all dead jobs?"), t("Dead jobs: {n}. The tracked ones leave the list, and their outcome stays recorded.", { n: number }), t("Dismiss {jobs}", { jobs: number })];
  }));
}
