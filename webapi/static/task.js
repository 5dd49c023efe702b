// A Task's own page: its bar, what is to be done next, its rows and its settings. Everything moves without a reload.

import { Follower, attempt, call, check, linked, upload } from "./api.js";
import { $, $$, drawBadge, drawBar, drawFacts, drawMixed, el, english, leave, mixed, moment, redraw, setText, show, showProblem, sure, user } from "./dom.js";
import { sparkline } from "./chart.js";
import { language, parts, t, tn } from "./i18n.js";
import { Pages, Rows, columnsOf, kind, line, place, reasons } from "./rows.js";
import {
  CALLBACKS, CALLED, COUNTS, KNOBS, ROWS, SHARDS, WAITS, badge, changes, count, duration, ended, left, listed, logged, nextStep, pace, percent, portion, rate, reached, retriable, rows, rowsOfFile, saidBy, segments,
  sentence, together, turned,
} from "./words.js";

const id = $("#task").dataset.id;
const self = `${document.body.dataset.api}/${id}`;
/** What the items are. */
const of = "shards" in $("#task").dataset ? SHARDS : ROWS;

const mayControl = "mayControl" in document.body.dataset;

/** The progress object that is shown. */
let current = null;

const poller = new Follower(document.body.dataset.api, id, {
  onChange: draw,
  async onData(p) {
    draw(p);
    await load();
  },
  onGone() {
    drawMixed($("#words"), t("This Task is not there any more."));
    for (const node of $$("[data-verb], #parts, #next-card")) show(node, false);
  },
});

function draw(p) {
  current = p;
  $("#task").setAttribute("aria-busy", "false");
  noteMove(p);
  noteTrend(p);
  drawHead(p);
  drawCounts(p);
  drawControls(p);
  if (knobs) drawKnobs(p);
  drawFacts($("#facts"), facts(p));
  drawNext(p);
  drawReports(p);
  drawCorrections(p);
  drawTabs(p);
}

// -- How far it is -----------------------------------------------------------------------------------------------------

let said = "";

function drawHead(p) {
  const title = p.title || t("Task {task}", { task: p.task_id });
  setText($("#task-title"), title);
  document.title = `${p.progress.percent === null ? "" : `${percent(p)} · `}${title}`;
  drawBadge($("#state"), badge(p));
  drawMixed($("#words"), sentence(p, of));
  drawBar($("#bar"), segments(p), { percent: reached(p), text: `${percent(p)}, ${sentence(p, of)}` });
  setText($("#percent"), p.counts.total || !p.done ? percent(p) : "");
  setText($("#of"), p.counts.total || !p.done ? t("{done} of {rows}", { done: count(ended(p)), rows: rows(rowsOfFile(p), of) }) : "");
  setText($("#pace"), pace(p, of));
  // A reader of screens hears every tenth and every change of state, not every row.
  const now = `${p.state} ${Math.floor((reached(p) ?? 0) / 10)}`;
  if (now !== said) drawMixed($("#live"), together(percent(p), sentence(p, of)));
  said = now;
}

// -- Why it stands still ------------------------------------------------------------------------------------------------

/** A reason in the reader's language; the API's own words, with what mends it, are English. */
function standing({ code, message, mend }) {
  const said = english(`${message}: ${mend}.`);
  return el("li", {}, ...(language === "en" || !(code in WAITS) ? [said] : [WAITS[code], " ", said]));
}

const STILL = 5_000;
let last = { now: "", since: 0, done: true };
let askedAt = 0;

function noteMove(p) {
  const now = JSON.stringify([p.state, p.counts, p.control]);
  if (now !== last.now) show($("#reasons"), false);
  last = { now, since: now === last.now ? last.since : Date.now(), done: p.done || p.state === "paused" || p.counts.working > 0 };
}

setInterval(async () => {
  if (last.done || document.hidden || Date.now() - Math.max(last.since, askedAt) < STILL) return;
  const asked = last.now;
  askedAt = Date.now();
  const { reasons } = await call(`${self}/waiting`, { has: "reasons" }).catch(() => ({ reasons: [] }));
  if (asked !== last.now) return;
  $("#reasons").replaceChildren(...reasons.map(standing));
  show($("#reasons"), reasons.length > 0);
}, 1_000);

// -- What this page has seen: rows per second in the last minutes, and when knobs changed --------------------------------

const SEEN_MS = 300_000;
const BARS = 50;
/** Answers may come about each second: shorter bars would show that, not the Task. */
const LEAST_MS = 2_000;
let seen = [];
let marks = [];

function noteTrend(p) {
  const at = Date.now();
  const now = { at, generation: p.generation, ended: p.progress.done, bad: p.counts.failed + p.counts.error, control: p.control };
  const before = seen.at(-1);
  if (before && before.generation !== now.generation) seen = []; // rows that run again are not done any more
  if (before) {
    const knobs = Object.keys(KNOBS).filter((name) => name in p.control && String(before.control[name]) !== String(p.control[name]));
    marks.push(...knobs.map((name) => ({ at, text: turned(name, before.control[name], p.control[name]) })));
  }
  seen = [...seen.filter((each) => at - each.at < SEEN_MS), now];
  marks = marks.filter((each) => at - each.at < SEEN_MS);
  drawTrend(at);
}

/** How many rows had ended at a time, between two answers in proportion. */
function endedAt(time, name) {
  const i = seen.findIndex((each) => each.at >= time);
  if (i < 0) return seen.at(-1)[name];
  if (i === 0) return seen[0][name];
  const [a, b] = [seen[i - 1], seen[i]];
  return a[name] + ((b[name] - a[name]) * (time - a.at)) / (b.at - a.at);
}

const trendLabel = (time, last) => (of === SHARDS
  ? t("Shards per second, as this page has seen them for {time}: {last} at last", { time, last })
  : t("Rows per second, as this page has seen them for {time}: {last} at last", { time, last }));

function drawTrend(until) {
  const since = seen[0].at;
  if (until - since < LEAST_MS || seen.at(-1).ended === seen[0].ended) return;
  const bars = Math.max(1, Math.min(BARS, Math.floor((until - since) / LEAST_MS)));
  const width = (until - since) / bars;
  const rates = (name) => Array.from({ length: bars }, (_, i) => {
    const [from, to] = [endedAt(since + i * width, name), endedAt(since + (i + 1) * width, name)];
    return Math.max(0, to - from) / (width / 1000);
  });
  const values = rates("ended");
  const label = trendLabel(duration((until - since) / 1000), rate(values.at(-1)));
  $("#trend").replaceChildren(sparkline(values, { label, bad: rates("bad"), marks, span: [since, until] }));
}

// -- The tiles: each leads to its rows ------------------------------------------------------------------------------------

const TILES = [...COUNTS.map(([name, word]) => [name, word, `#rows?status=${name}`, (p) => p.counts[name]]),
  ["rejected", t("not accepted"), "#rejected", (p) => p.split.rejected]];

function drawCounts(p) {
  const box = $("#counts");
  for (const [name, word, href, number] of TILES) {
    let tile = $(`[data-kind="${name}"]`, box);
    if (!tile) {
      tile = el("a", { "data-kind": name, class: `count ${name}`, href }, el("span", {}, word), el("strong", {}));
      box.append(el("li", {}, tile));
    }
    setText($("strong", tile), count(number(p)));
    tile.classList.toggle("zero", number(p) === 0);
  }
}

// -- Control -----------------------------------------------------------------------------------------------------------

const ALLOWED = {
  pause: (p) => ["splitting", "running"].includes(p.state),
  // A Task over its limit would pause itself again: it goes on with a higher limit, or a retry.
  resume: (p) => p.state === "paused" && p.state_reason !== "too_many_failures",
  cancel: (p) => ["splitting", "running", "paused"].includes(p.state),
  retry: (p) => (["running", "finished"].includes(p.state) || (p.state_reason === "too_many_failures" && !["splitting", "open"].includes(p.split.state))) && retriable(p, "failed", "error") > 0,
  "retry-cancelled": (p) => p.state === "cancelled" && p.done && p.counts.cancelled > 0 && retriable(p, "failed", "error", "cancelled") > 0,
  callbacks: (p) => p.done && p.state_reason === "callback_failed",
  seal: (p) => p.split.state === "open" && p.state !== "cancelled",
};

const ASKED = {
  cancel: [t("Cancel this Task?"), t("Nothing new is started. What runs now goes on to its end; the rest becomes cancelled and can be run later."), t("Cancel the Task"), t("Keep it running")],
  seal: [t("Seal this Task?"), t("Nothing more can be added to it, and it ends once what it has is done."), t("Seal the Task"), t("Keep it open")],
};

function drawControls(p) {
  for (const button of $$("[data-verb]")) show(button, ALLOWED[button.dataset.verb](p));
  for (const button of $$("[data-again]")) show(button, ALLOWED.retry(p));
}

for (const button of $$("[data-verb]")) button.addEventListener("click", () => act(button));

async function act(button) {
  const verb = button.dataset.verb;
  if (verb in ASKED && !(await sure(...ASKED[verb]))) return;
  await post(button, verb === "retry-cancelled" ? `${self}/retry?status=failed,error,cancelled` : `${self}/${verb}`);
}

/** Does it, and looks again at once, whatever came of it. Returns whether it was done. */
async function post(button, path) {
  const done = await attempt($("#problem"), button, async () => draw(await call(path, { method: "POST", has: "counts" })));
  poller.now();
  return done;
}

// -- Knobs -------------------------------------------------------------------------------------------------------------

const knobs = $("#knobs");
/** The knobs that somebody has changed and not applied. Only they are sent; the others follow the server. */
const edited = new Set();
/** What the server last said of each knob, as its field shows it. */
let known = {};

const MINUTE_MS = 60_000;

/** A time as a field of the reader's zone takes it, in minutes; empty if there is none. */
const local = (text) => (text ? new Date(Date.parse(text) - new Date(text).getTimezoneOffset() * MINUTE_MS).toISOString().slice(0, 16) : "");

const shownKnobs = ({ parallel, interval, priority, tolerated_failures: tolerated, start_at: start }) => ({
  parallel: String(parallel ?? ""), interval: String(interval), tolerated_failures: String(tolerated ?? ""), priority: String(priority), start_at: local(start),
});

/** The value of a field, as it is sent. An empty one is no limit, and no time to wait for; the others cannot be empty. */
function knob(field) {
  const text = field.value.trim();
  if (text === "") return null;
  if (field.type === "datetime-local") return new Date(text).toISOString();
  return field.type === "number" ? Number(text) : text;
}

knobs?.addEventListener("input", ({ target }) => {
  const { slides } = target.dataset;
  const field = slides === undefined ? target : knobs[slides];
  if (slides !== undefined) field.value = SCALES[slides].value(Number(target.value));
  else drawSlider(field.name);
  edited.add(field.name);
  setText($("#knobs-said"), "");
});

knobs?.addEventListener("submit", (event) => {
  event.preventDefault();
  apply([...edited], $("button", knobs));
});

// A slider is applied when it is let go; its number field, like the others, with the button.
knobs?.addEventListener("change", ({ target }) => target.dataset.slides !== undefined && apply([target.dataset.slides], target));

async function apply(names, control) {
  showProblem($("#problem"), null);
  const sent = names.map((name) => knobs[name]).filter((field) => field.value !== known[field.name]);
  const before = sent.map((field) => field.value);
  if (sent.length === 0) {
    setText($("#knobs-said"), t("There is nothing to apply: every field is as the Task has it."));
    return;
  }
  await attempt($("#problem"), control, async () => {
    const body = Object.fromEntries(sent.map((field) => [field.name, knob(field)]));
    const p = await call(self, { method: "PATCH", body, has: "counts" });
    sent.forEach((field, i) => field.value === before[i] && edited.delete(field.name));
    draw(p);
    setText($("#knobs-said"), t("Applied; jobs that start from now on follow it."));
  });
  poller.now();
}

/** The sliders, 0 to 100: by logarithms, because 1 and 2 differ as much as 500 and 1,000. */
const END = 100;
const MOST = { parallel: 1_000, interval: 3_600 };
const LEAST = 0.1; // seconds of the smallest interval
const SCALES = {
  // The right end is no limit.
  parallel: {
    value: (at) => (at >= END ? "" : String(Math.round(MOST.parallel ** (at / (END - 1))))),
    at: (text) => (text === "" ? END : (END - 1) * Math.log(Math.max(1, Number(text))) / Math.log(MOST.parallel)),
    said: (text) => (text === "" ? t("no limit") : text),
  },
  // The left end is no interval.
  interval: {
    value: (at) => (at <= 0 ? "0" : String(Number((LEAST * (MOST.interval / LEAST) ** ((at - 1) / (END - 1))).toPrecision(2)))),
    at: (text) => (Number(text) <= 0 ? 0 : 1 + (END - 1) * Math.log(Math.max(LEAST, Number(text)) / LEAST) / Math.log(MOST.interval / LEAST)),
    said: (text) => (Number(text) <= 0 ? t("no interval") : t("{seconds} s", { seconds: text })),
  },
};

function drawSlider(name) {
  const slider = $(`[data-slides="${name}"]`, knobs);
  if (slider === null) return;
  const { value } = knobs[name];
  if (slider !== document.activeElement || SCALES[name].value(Number(slider.value)) !== value) slider.value = SCALES[name].at(value);
  slider.setAttribute("aria-valuetext", SCALES[name].said(value));
}

function drawKnobs(p) {
  const now = shownKnobs(p.control);
  const waits = p.started_at === null && !p.done;
  show(knobs.start_at.closest(".field"), waits);
  if (!waits) edited.delete("start_at");
  for (const [name, value] of Object.entries(now)) {
    const field = knobs[name];
    const same = field.value === value || field.value === known[name];
    // What somebody is typing is not overwritten under their hands; what they took back is no edit any more.
    if (p.done || (same && field !== document.activeElement)) edited.delete(name);
    if (!edited.has(name) && field.value !== value) field.value = value;
  }
  known = now;
  for (const name of Object.keys(SCALES)) drawSlider(name);
  knobs.parallel.placeholder = p.control.interval > 0 ? "1" : t("no limit");
  for (const field of knobs.elements) if (field.type !== "submit") field.disabled = p.done;
  show($("button", knobs), !p.done);
}

const facts = (p) => [
  [t("Worker"), p.worker], [t("In flight, about"), count(p.control.in_flight)], [t("Submitted"), moment(p.created_at)], [t("Began"), moment(p.started_at)],
  [t("Ended"), moment(p.finished_at)], [t("Waiting for another try"), count(p.retrying)],
  ...(knobs ? [] : [...settings(p), [KNOBS.start_at, p.started_at === null && p.control.start_at && moment(p.control.start_at)]]),
  ...p.callbacks.map((each) => [CALLBACKS[each.name], `${each.worker}${t(": ")}${CALLED[each.status] ?? t("not called")}`]),
];

/** The knobs of a Task, for those who may not turn them. */
const settings = ({ control: { parallel, interval, priority, tolerated_failures: tolerated } }) => [
  [t("Jobs at once"), parallel === null ? t("no limit") : count(parallel)], [t("Seconds from round to round"), count(interval)],
  [t("Pause after more failures than"), tolerated ?? t("no limit")], [t("Priority"), count(priority)],
];

// -- What is to be done next -----------------------------------------------------------------------------------------

function drawNext(p) {
  const [heading, text] = nextStep(p, of);
  setText($("#next-heading"), heading);
  setText($("#next-text"), text);
  show($("#next-text"), text !== "");
  $("#next-card").classList.toggle("step", p.done && left(p) > 0);
}

// -- Reports -----------------------------------------------------------------------------------------------------------

/** The file has all rows that did not succeed, also those that were sent again: then it is not what is to be corrected. */
const unsuccessful = (p) => (of === SHARDS ? t("Shards that did not succeed") : p.resubmitted > 0 ? t("Rows that did not succeed") : t("Rows to correct"));

const REPORTS = [
  ["failed", unsuccessful, (p) => p.counts.failed + p.counts.error + p.split.rejected],
  ["succeeded", () => (of === SHARDS ? t("Shards that succeeded") : t("Rows that succeeded")), (p) => p.counts.finish],
  ["unprocessed", () => (of === SHARDS ? t("Shards not processed") : t("Rows not processed")), (p) => (p.done ? p.counts.cancelled : 0)],
];

/** Has a link to a file say why if there is none just now. `href`: the file, when it is asked for. */
function guarded(link, href) {
  let checked = false;
  link.addEventListener("click", async (event) => {
    if (checked) return;
    event.preventDefault();
    link.href = linked(href());
    checked = await attempt($("#problem"), link, () => check(href()));
    if (checked) link.click();
    checked = false;
  });
}

function download(href, text, attributes = {}) {
  const link = el("a", { class: "button", href: linked(href), download: true, ...attributes }, text);
  guarded(link, () => href);
  return link;
}

function drawReports(p) {
  const box = $("#reports");
  let some = false;
  for (const [kind, words, number] of REPORTS) {
    let item = $(`[data-rows="${kind}"]`, box);
    const word = words(p);
    if (item?.dataset.word !== word) {
      const before = item;
      const link = (suffix) => download(`${self}/report.${suffix}?rows=${kind}`, suffix, { "aria-label": t("{rows}, as {format}", { rows: word, format: suffix }) });
      item = el("li", { "data-rows": kind, "data-word": word }, el("span", { class: "grow" }, `${word} `, el("span", { class: "quiet number" })), link("xlsx"), link("csv"));
      if (before) before.replaceWith(item);
      else box.append(item);
    }
    const n = number(p);
    setText($(".number", item), count(n));
    show(item, n > 0);
    some ||= n > 0;
  }
  if (p.result !== null) {
    let item = $('[data-rows="result"]', box);
    if (!item) {
      item = el("li", { "data-rows": "result" }, el("span", { class: "grow" }, t("The export"), " ", el("span", { class: "quiet number" })), download(p.links.result, p.result.format));
      box.prepend(item);
    }
    setText($(".number", item), p.result.partial ? t("{rows}, shards are missing", { rows: rows(p.result.rows) }) : rows(p.result.rows));
    some = true;
  }
  const made = $('[data-rows="result"]', box);
  if (made) show(made, p.result !== null);
  show($("#no-reports"), !some);
}

// -- Correct and upload again -------------------------------------------------------------------------------------------

const correct = $("#correct");

const link = (task) => el("a", { href: new URL(task, location.href).pathname }, t("Task {task}", { task }));

function drawCorrections(p) {
  // Of a list that was not accepted as a whole there is no row whose place a corrected one could take.
  if (correct) show(correct, notTaken || p.state_reason !== "rows_rejected" && left(p) > 0 && REPORTS[0][2](p) + REPORTS[2][2](p) > 0);
  const box = $("#corrections");
  const now = JSON.stringify([p.parent, p.resubmit_of, p.resubmitted_by]);
  if (box.dataset.now === now) return;
  box.dataset.now = now;
  box.replaceChildren(
    ...(p.parent === null ? [] : [...parts("A job of {task} submitted this list.", { task: link(p.parent) }), " "]),
    ...(p.resubmit_of === null ? [] : [...parts("These rows correct those of {task}.", { task: link(p.resubmit_of) }), " "]),
    ...(p.resubmitted_by.length ? parts("Corrected with {tasks}.", { tasks: p.resubmitted_by.flatMap((task, i) => [i ? t(", ") : "", link(task)]) }) : []),
  );
  show(box, box.childNodes.length > 0);
}

// -- Children ----------------------------------------------------------------------------------------------------------

const CHILDREN = 20;

async function loadChildren(p) {
  show($("#children-card"), p.children !== null);
  if (p.children === null) return;
  const { counts, done, open } = p.children;
  setText($("#children-sum"), t("{done} of {tasks} done: {succeeded} of {rows} succeeded.", { done: count(done), tasks: count(done + open), succeeded: count(counts.finish), rows: rows(counts.total) }));
  if (new URLSearchParams(location.search).has("link")) return; // it opens this Task alone, and the sums are all it shows
  const page = await call(`${document.body.dataset.api}?parent=${id}&limit=${CHILDREN}`, { has: "tasks" });
  $("#children").replaceChildren(...page.tasks.map((each) => el("li", {},
    el("span", { class: "grow" }, link(each.task_id), " ", user(each.title || each.worker)),
    el("span", { class: "quiet" }, listed([percent(each), badge(each)[0]])))));
}

/** Whether the last sending had no good answer: its rows may have been taken, and it may be sent again as it is. */
let notTaken = false;

correct?.addEventListener("submit", (event) => {
  event.preventDefault();
  sendCorrected({});
});

async function sendCorrected(options) {
  if (!correct.reportValidity()) return;
  const again = (name, value) => sendCorrected({ ...options, [name]: value });
  notTaken = !(await attempt($("#problem"), $("button", correct), async () => {
    const fields = new FormData(correct);
    fields.set("worker", correct.dataset.worker);
    fields.set("resubmit_of", id);
    for (const [name, value] of Object.entries(options)) fields.set(name, value);
    const task = await upload(document.body.dataset.api, fields, () => {});
    await leave(task.links.ui);
  }, again));
  poller.now();
}

// -- The parts: tabs, of which the address names the open one -----------------------------------------------------------

const tabs = $$("[role=tab]");
let open = "rows";

/** The name and the parameters of the part that the address names. */
function addressed() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return [tabs.some((tab) => tab.dataset.tab === name) ? name : "rows", new URLSearchParams(query)];
}

function openPart() {
  const [name, query] = addressed();
  open = name;
  for (const tab of tabs) {
    const chosen = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    show($(`#panel-${tab.dataset.tab}`), chosen);
  }
  if (name === "rows") table.filter(query);
  for (const tile of $$("#counts a")) {
    if (name !== "" && tile.hash === location.hash) tile.setAttribute("aria-current", "true");
    else tile.removeAttribute("aria-current");
  }
  if (current !== null) poller.anew();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(tab);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const to = tabs.at(next % tabs.length);
    choose(to);
    to.focus();
  });
}

function choose(tab) {
  history.replaceState(null, "", `#${tab.dataset.tab}`);
  openPart();
}

window.addEventListener("hashchange", openPart);

function drawTabs(p) {
  const numbers = { problems: p.counts.failed + p.counts.error, rejected: p.split.rejected, rows: p.counts.total };
  for (const [name, n] of Object.entries(numbers)) setText($(`#tab-${name} .tab-count`), n > 0 ? count(n) : "");
}

/** Loads what the open part shows, and what has a request of its own beside the progress. The poller comes back to what
 * cannot be loaded. */
async function load() {
  const p = current;
  await Promise.all([PARTS[open](p), loadRefusal(p), loadChildren(p)]);
}

const PARTS = {
  rows: (p) => table.update(p),
  problems: loadGroups,
  rejected: loadRejected,
  activity: loadLog,
  settings: () => null,
};

// -- The rows ----------------------------------------------------------------------------------------------------------

let timer = null;

function later(ms) {
  clearTimeout(timer);
  timer = setTimeout(() => poller.anew(), ms);
}

const table = new Rows({
  self,
  of,
  later,
  choose(query) {
    history.pushState(null, "", `#rows${query.size ? `?${query}` : ""}`);
    openPart();
  },
  report: (link, href) => guarded(link, () => href()),
  retry: mayControl ? (button, path) => post(button, `${self}/${path}`) : null,
  mayRetry: (p) => ALLOWED.retry(p) || ALLOWED["retry-cancelled"](p),
});

// -- Rows that were not accepted ---------------------------------------------------------------------------------------

const rejected = new Pages("rejected", () => `${self}/rejected?`, "rejected", (page) => {
  const columns = columnsOf([], page.rejected.map((each) => each.cells));
  $("#rejected thead tr").replaceChildren(...[t("Row"), t("Reasons"), ...columns.map(([, header]) => header)].map((word, i) =>
    el("th", { scope: "col", class: i === 0 ? "number" : null }, user(word))));
  $("#rejected tbody").replaceChildren(...page.rejected.map((each) => {
    const faulty = new Set(each.errors.map((error) => error.column));
    return el("tr", {}, el("td", { class: "number" }, count(each.row)), el("td", {}, reasons(each)), line(columns, each.cells, faulty));
  }));
}, later);

async function loadRejected(p) {
  show($("#rejected-card"), p.split.rejected > 0);
  show($("#no-rejected"), p.split.rejected === 0);
  await rejected.update(p.split.rejected);
}

let refused = "";

/** What is wrong with a list that was not accepted as a whole: its columns, say. Its rows have a table of their own. */
async function loadRefusal(p) {
  const now = p.state === "rejected" ? `${p.task_id} ${p.version}` : "";
  if (now === refused || p.state !== "rejected" || p.split.rejected > 0) return;
  const { refusal } = await call(`${self}?include=errors`, { has: "counts" });
  refused = now;
  if (refusal?.errors.length) showProblem($("#problem"), { detail: refusal.message, errors: refusal.errors });
}

// -- Problems: what went wrong, and how often ---------------------------------------------------------------------------

const FIRST = 10;
let grouped = "";

async function loadGroups(p) {
  const bad = p.counts.failed + p.counts.error;
  show($("#no-groups"), bad === 0);
  show($("#groups-box"), bad > 0);
  const now = `${p.generation} ${p.counts.failed} ${p.counts.error}`;
  if (now === grouped) return;
  const { errors } = await call(`${self}/errors`, { has: "errors" });
  const all = errors.reduce((sum, g) => sum + g.count, 0);
  redraw($("#groups tbody"), $("#panel-problems"), () => $("#groups tbody").replaceChildren(...errors.map((g) =>
    el("tr", {}, el("td", { class: "number" }, count(g.count)), el("td", { class: "number" }, portion(g.count, all)),
      el("td", {}, kind(g.status)), el("td", {}, user(saidBy(g)), instance(g)),
      el("td", {}, samples(g)), el("td", {}, mayControl && el("span", { class: "row" }, again(g)))))));
  grouped = now;
  drawControls(current);
}

/** One of the messages of a group that shows what they have in common. */
const instance = (g) => (g.count === 1 || g.template === g.message ? null : el("p", { class: "quiet" }, parts("For instance: {message}", { message: user(g.message) })));

/** Some of the rows of a group; the first leads to its job. */
function samples(g) {
  const [first = t("job"), ...others] = g.sample_rows.slice(0, 5).map((n) => count(n));
  const rest = others.map((n) => `${t(", ")}${n}`);
  return [g.sample_job_id === null ? first : el("a", { href: place(g.sample_job_id), "aria-label": t("{row}: its job", { row: first }) }, first), ...rest];
}

/** The buttons that run the rows of one group again: the first of them, to see whether that helps, and all. */
function again(group) {
  const button = (word, limit) => {
    const node = el("button", { type: "button", class: "ghost", "data-again": "", hidden: "" }, word);
    const query = { status: group.status, message: group.message, ...limit };
    node.addEventListener("click", () => post(node, `${self}/retry?${new URLSearchParams(query)}`));
    return node;
  };
  return [group.count > FIRST && button(t("Run {n} first", { n: FIRST }), { limit: FIRST }), button(t("Run all"), {})];
}

// -- Activity: who changed what ------------------------------------------------------------------------------------------

let told = "";

async function loadLog(p) {
  const now = `${p.version}`;
  if (now === told) return;
  const { log } = await call(`${self}/log`, { has: "log" });
  show($("#no-activity"), log.length === 0);
  show($("#activity-box"), log.length > 0);
  redraw($("#activity tbody"), $("#panel-activity"), () => $("#activity tbody").replaceChildren(...log.map((entry) =>
    el("tr", {}, el("td", {}, moment(entry.at)), el("td", {}, user(entry.who || "–")),
      mixed("td", logged(entry, of)), el("td", {}, mayControl && undo(entry))))));
  told = now;
}

/** The button that turns the knobs back which an entry of the log changed; none where another change came after it. */
function undo(entry) {
  const now = { ...current.control, title: current.title };
  const turned = changes(entry).filter(([name, before, after]) => name in now && String(now[name]) === String(after) && before !== after);
  const back = Object.fromEntries(turned.filter(([name]) => !current.done || name === "title").map(([name, before]) => [name, before]));
  if (Object.keys(back).length === 0) return null;
  const button = el("button", { type: "button", class: "ghost", "data-undo": "", "aria-label": t("Undo: {change}", { change: logged(entry, of) }) }, t("Undo"));
  button.addEventListener("click", async () => {
    await attempt($("#problem"), button, async () => draw(await call(self, { method: "PATCH", body: back, has: "counts" })));
    poller.now();
  });
  return button;
}

openPart();
poller.start();
