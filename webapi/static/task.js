// A Task's own page: its bar, its knobs, its failures. Everything moves without a reload.

import { Poller, attempt, call, check, linked, upload } from "./api.js";
import { $, $$, cells, drawBadge, drawBar, el, leave, setText, show, showProblem, user } from "./dom.js";
import { CALLBACKS, CALLED, COUNTS, KINDS, badge, count, pace, percent, reached, rows, saidBy, segments, sentence, when } from "./words.js";

const id = $("#task").dataset.id;
const self = `${document.body.dataset.api}/${id}`;
const PAGE = 20;

const mayControl = "mayControl" in document.body.dataset;

/** The progress object that is shown. */
let current = null;

const poller = new Poller(self, {
  has: "counts",
  async onData(p) {
    draw(p);
    await loadTables(p);
  },
  onGone() {
    setText($("#words"), "This Task is not there any more.");
    for (const node of $$("[data-verb], [data-again], #knobs, #correct")) show(node, false);
  },
}).start();

function draw(p) {
  current = p;
  $("#task").setAttribute("aria-busy", "false");
  noteMove(p);
  drawHead(p);
  drawCounts(p);
  drawControls(p);
  if (knobs) drawKnobs(p);
  drawFacts(p);
  drawReports(p);
  drawCorrections(p);
}

// -- How far it is -----------------------------------------------------------------------------------------------------

let said = "";

function drawHead(p) {
  const title = p.title || `Task ${p.task_id}`;
  setText($("#task-title"), title);
  document.title = `${p.progress.percent === null ? "" : `${Math.floor(p.progress.percent)} % · `}${title}`;
  drawBadge($("#state"), badge(p));
  setText($("#words"), sentence(p));
  drawBar($("#bar"), segments(p), { percent: reached(p), text: `${percent(p)}, ${sentence(p)}` });
  setText($("#percent"), p.counts.total || !p.done ? percent(p) : "");
  setText($("#of"), p.counts.total || !p.done ? `${count(p.progress.done)} of ${rows(p.counts.total)}` : "");
  setText($("#pace"), pace(p));
  // A reader of screens hears every tenth and every change of state, not every row.
  const now = `${p.state} ${Math.floor((p.progress.percent ?? 0) / 10)}`;
  if (now !== said) setText($("#live"), `${percent(p)}. ${sentence(p)}`);
  said = now;
}

// -- Why it stands still ------------------------------------------------------------------------------------------------

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
  $("#reasons").replaceChildren(...reasons.map((each) => el("li", {}, user(each.message), `: ${each.mend}.`)));
  show($("#reasons"), reasons.length > 0);
}, 1_000);

function drawCounts(p) {
  const box = $("#counts");
  for (const [kind, word] of COUNTS) {
    let item = $(`[data-kind="${kind}"]`, box);
    if (!item) {
      item = el("div", { "data-kind": kind, class: `count ${kind}` }, el("dt", {}, word), el("dd", {}));
      box.append(item);
    }
    setText($("dd", item), count(p.counts[kind]));
    item.classList.toggle("zero", p.counts[kind] === 0);
  }
}

// -- Control -----------------------------------------------------------------------------------------------------------

const ALLOWED = {
  pause: (p) => ["splitting", "running"].includes(p.state),
  // A Task over its limit would pause itself again: it goes on with a higher limit, or a retry.
  resume: (p) => p.state === "paused" && p.state_reason !== "too_many_failures",
  cancel: (p) => ["splitting", "running", "paused"].includes(p.state),
  retry: (p) => (["running", "finished"].includes(p.state) || (p.state_reason === "too_many_failures" && !["splitting", "open"].includes(p.split.state))) && p.counts.failed + p.counts.error > 0,
  "retry-cancelled": (p) => p.state === "cancelled" && p.done && p.counts.cancelled > 0,
  callbacks: (p) => p.done && p.state_reason === "callback_failed",
};

function drawControls(p) {
  for (const button of $$("[data-verb]")) show(button, ALLOWED[button.dataset.verb](p));
  for (const button of $$("[data-again]")) show(button, ALLOWED.retry(p));
}

for (const button of $$("[data-verb]")) button.addEventListener("click", () => act(button));

async function act(button) {
  const verb = button.dataset.verb;
  if (verb === "cancel" && !(await sure())) return;
  await post(button, verb === "retry-cancelled" ? `${self}/retry?status=failed,error,cancelled` : `${self}/${verb}`);
}

/** Does it, and looks again at once, whatever came of it. */
async function post(button, path) {
  await attempt($("#problem"), button, async () => draw(await call(path, { method: "POST", has: "counts" })));
  poller.now();
}

function sure() {
  const dialog = $("#confirm");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

// -- Knobs -------------------------------------------------------------------------------------------------------------

const knobs = $("#knobs");
/** The knobs that somebody has changed and not applied. Only they are sent; the others follow the server. */
const edited = new Set();
/** What the server last said of each knob, as its field shows it. */
let known = {};

const shownKnobs = ({ parallel, interval, priority, tolerated_failures: tolerated }) => ({
  parallel: String(parallel ?? ""), interval: String(interval), tolerated_failures: String(tolerated ?? ""), priority: String(priority),
});

/** The value of a field, as it is sent. An empty one is no limit; the others cannot be empty. */
function knob(field) {
  const text = field.value.trim();
  if (text === "") return null;
  return field.type === "number" ? Number(text) : text;
}

knobs?.addEventListener("input", (event) => {
  edited.add(event.target.name);
  setText($("#knobs-said"), "");
});

knobs?.addEventListener("submit", async (event) => {
  event.preventDefault();
  showProblem($("#problem"), null);
  const sent = [...edited].map((name) => knobs[name]).filter((field) => field.value !== known[field.name]);
  const before = sent.map((field) => field.value);
  if (sent.length === 0) {
    setText($("#knobs-said"), "There is nothing to apply: every field is as the Task has it.");
    return;
  }
  await attempt($("#problem"), $("button", knobs), async () => {
    const body = Object.fromEntries(sent.map((field) => [field.name, knob(field)]));
    const p = await call(self, { method: "PATCH", body, has: "counts" });
    sent.forEach((field, i) => field.value === before[i] && edited.delete(field.name));
    draw(p);
    setText($("#knobs-said"), "Applied; jobs that start from now on follow it.");
  });
  poller.now();
});

function drawKnobs(p) {
  const now = shownKnobs(p.control);
  for (const [name, value] of Object.entries(now)) {
    const field = knobs[name];
    const same = field.value === value || field.value === known[name];
    // What somebody is typing is not overwritten under their hands; what they took back is no edit any more.
    if (p.done || (same && field !== document.activeElement)) edited.delete(name);
    if (!edited.has(name) && field.value !== value) field.value = value;
  }
  known = now;
  knobs.parallel.placeholder = p.control.interval > 0 ? "1" : "no limit";
  for (const field of knobs.elements) if (field.type !== "submit") field.disabled = p.done;
  show($("button", knobs), !p.done);
}

function drawFacts(p) {
  const facts = [
    ["Worker", p.worker], ["In flight, about", count(p.control.in_flight)], ["Handed in", when(p.created_at)], ["Began", when(p.started_at)],
    ["Ended", when(p.finished_at)], ["Rows not accepted", count(p.split.rejected)], ["Waiting for another try", count(p.retrying)],
    ...(knobs ? [] : settings(p)),
    ...p.callbacks.map((each) => [CALLBACKS[each.name], `${each.worker}: ${CALLED[each.status] ?? "not called"}`]),
  ];
  const box = $("#facts");
  facts.forEach(([name, value], i) => {
    const pair = box.children[i] ?? box.appendChild(el("div", {}, el("dt", {}, name), el("dd", { dir: "auto" })));
    setText($("dd", pair), value);
  });
}

/** The knobs of a Task, for those who may not turn them. */
const settings = ({ control: { parallel, interval, priority, tolerated_failures: tolerated } }) => [
  ["Jobs at once", parallel === null ? "no limit" : count(parallel)], ["Seconds from round to round", count(interval)],
  ["Pause after more failures than", tolerated ?? "no limit"], ["Priority", count(priority)],
];

// -- Reports -----------------------------------------------------------------------------------------------------------

const REPORTS = [
  ["failed", "Rows to correct", (p) => p.counts.failed + p.counts.error + p.split.rejected],
  ["succeeded", "Rows that succeeded", (p) => p.counts.finish],
  ["unprocessed", "Rows not processed", (p) => (p.done ? p.counts.cancelled : 0)],
];

/** A link to a file, that says why if there is none just now. */
function download(href, text, attributes = {}) {
  const link = el("a", { class: "button", href: linked(href), download: true, ...attributes }, text);
  let checked = false;
  link.addEventListener("click", async (event) => {
    if (checked) return;
    event.preventDefault();
    checked = await attempt($("#problem"), link, () => check(href));
    if (checked) link.click();
    checked = false;
  });
  return link;
}

function drawReports(p) {
  const box = $("#reports");
  let some = false;
  for (const [kind, word, number] of REPORTS) {
    let item = $(`[data-rows="${kind}"]`, box);
    if (!item) {
      const link = (suffix) => download(`${self}/report.${suffix}?rows=${kind}`, suffix, { "aria-label": `${word}, as ${suffix}` });
      item = el("li", { "data-rows": kind }, el("span", { class: "grow" }, `${word} `, el("span", { class: "quiet number" })), link("xlsx"), link("csv"));
      box.append(item);
    }
    const n = number(p);
    setText($(".number", item), count(n));
    show(item, n > 0);
    some ||= n > 0;
  }
  if (p.result !== null) {
    let item = $('[data-rows="result"]', box);
    if (!item) {
      item = el("li", { "data-rows": "result" }, el("span", { class: "grow" }, "The export ", el("span", { class: "quiet number" })), download(p.links.result, p.result.format));
      box.prepend(item);
    }
    setText($(".number", item), `${count(p.result.rows)} rows${p.result.partial ? ", shards are missing" : ""}`);
    some = true;
  }
  const made = $('[data-rows="result"]', box);
  if (made) show(made, p.result !== null);
  show($("#no-reports"), !some);
}

// -- Correct and upload again -------------------------------------------------------------------------------------------

const correct = $("#correct");

const link = (task) => el("a", { href: new URL(task, location.href).pathname }, `Task ${task}`);

function drawCorrections(p) {
  // Of a list that was not accepted as a whole there is no row whose place a corrected one could take.
  if (correct) show(correct, p.state_reason !== "rows_rejected" && REPORTS[0][2](p) + REPORTS[2][2](p) > 0);
  const box = $("#corrections");
  const now = JSON.stringify([p.parent, p.resubmit_of, p.resubmitted_by, p.mended]);
  if (box.dataset.now === now) return;
  box.dataset.now = now;
  box.replaceChildren(
    ...(p.parent === null ? [] : ["A job of ", link(p.parent), " submitted this list. "]),
    ...(p.resubmit_of === null ? [] : ["These rows correct those of ", link(p.resubmit_of), ". "]),
    ...(p.resubmitted_by.length ? ["Corrected with ", ...p.resubmitted_by.flatMap((task, i) => [i ? ", " : "", link(task)]), ": "] : []),
    ...(p.resubmitted_by.length || p.mended ? [`${rows(p.mended)} mended since.`] : []),
  );
  show(box, box.childNodes.length > 0);
}

// -- Children ----------------------------------------------------------------------------------------------------------

const CHILDREN = 20;

async function loadChildren(p) {
  show($("#children-card"), p.children !== null);
  if (p.children === null) return;
  const { counts, done, open } = p.children;
  setText($("#children-sum"), `${count(done)} of ${count(done + open)} done: ${count(counts.finish)} of ${rows(counts.total)} succeeded.`);
  if (new URLSearchParams(location.search).has("link")) return; // it opens this Task alone, and the sums are all it shows
  const page = await call(`${document.body.dataset.api}?parent=${id}&limit=${CHILDREN}`, { has: "tasks" });
  $("#children").replaceChildren(...page.tasks.map((each) => el("li", {},
    el("span", { class: "grow" }, link(each.task_id), " ", user(each.title || each.worker)),
    el("span", { class: "quiet" }, `${percent(each)}, ${badge(each)[0]}`))));
}

correct?.addEventListener("submit", (event) => {
  event.preventDefault();
  sendCorrected({});
});

async function sendCorrected(options) {
  if (!correct.reportValidity()) return;
  const again = (name, value) => sendCorrected({ ...options, [name]: value });
  await attempt($("#problem"), $("button", correct), async () => {
    const fields = new FormData(correct);
    fields.set("worker", correct.dataset.worker);
    fields.set("resubmit_of", id);
    for (const [name, value] of Object.entries(options)) fields.set(name, value);
    const task = await upload(document.body.dataset.api, fields, () => {});
    await leave(task.links.ui);
  }, again);
  poller.now();
}

// -- Failures ----------------------------------------------------------------------------------------------------------

/** A table that is read page by page, forward and back, and loaded again only when its number of rows has changed. */
class Pages {
  constructor(name, url, items, row) {
    Object.assign(this, { name, url, items, row, starts: [null], next: null, seen: -1, loading: Promise.resolve() });
    const button = (word, step) => {
      const node = el("button", { type: "button", class: "ghost" }, word);
      node.addEventListener("click", () => this.turn(node, step));
      return node;
    };
    [this.back, this.place, this.on] = [button("← Earlier", -1), el("span", { class: "quiet" }), button("Later →", 1)];
    this.back.hidden = this.on.hidden = true;
    $(`[data-pager="${name}"]`).append(this.back, this.place, this.on);
  }

  async update(number) {
    await this.loading;
    show($(`#${this.name}-card`), number > 0);
    if (number === this.seen) return;
    const starts = number < this.seen ? [null] : this.starts; // run again: the page that was open may be gone
    this.number = number;
    if (number > 0) await this.open(starts);
    this.seen = number;
  }

  async turn(button, step) {
    await this.loading;
    const starts = step > 0 ? [...this.starts, this.next] : this.starts.slice(0, -1);
    await attempt($("#problem"), button, () => this.open(starts));
    this.enable();
  }

  /** Loads a page, which is the last of these starts. */
  async open(starts) {
    let done;
    this.loading = new Promise((resolve) => { done = resolve; });
    try {
      const after = starts.at(-1);
      const page = await call(`${this.url}limit=${PAGE}${after === null ? "" : `&after=${after}`}`, { has: this.items });
      this.starts = starts;
      this.fill(page, this.number);
    } finally {
      done();
    }
  }

  enable() {
    this.back.disabled = this.starts.length === 1;
    this.on.disabled = this.next === null;
  }

  fill(page, number) {
    $(`#${this.name} tbody`).replaceChildren(...page[this.items].map(this.row));
    this.next = page.links.next === null ? null : new URL(page.links.next, location.href).searchParams.get("after");
    const first = (this.starts.length - 1) * PAGE;
    setText(this.place, `${count(first + 1)}–${count(first + page[this.items].length)} of ${count(number)}`);
    this.enable();
    show(this.back, number > PAGE);
    show(this.on, number > PAGE);
  }
}

const failed = new Pages("failed", `${self}/events?status=failed,error&`, "events", (e) =>
  el("tr", {}, el("td", { class: "number" }, e.row ?? ""), el("td", {}, kind(e.status)), el("td", {}, user(reason(e))),
    el("td", { class: "number" }, count(e.attempt)), el("td", {}, cells(e.params))));

const rejected = new Pages("rejected", `${self}/rejected?`, "rejected", (r) =>
  el("tr", {}, el("td", { class: "number" }, r.row ?? ""), el("td", {}, reasons(r)), el("td", {}, cells(r.cells))));

const kind = (status) => el("span", { class: `badge ${status}` }, KINDS[status] ?? status);

function reason(event) {
  const last = event.messages.findLast((m) => m.status === event.status) ?? event.messages.at(-1);
  return last?.message ?? "";
}

const reasons = (r) => el("ul", { class: "reasons" }, r.errors.map((e) =>
  el("li", {}, e.column === null ? null : [user(e.column, { class: "user name" }), ": "], user(e.message))));

/** What has a request of its own beside the progress. The poller comes back to what cannot be loaded. */
async function loadTables(p) {
  const bad = p.counts.failed + p.counts.error;
  await Promise.all([failed.update(bad), rejected.update(p.split.rejected), loadGroups(p, bad), loadRefusal(p), loadChildren(p)]);
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

let grouped = "";

async function loadGroups(p, bad) {
  show($("#groups-card"), bad > 0);
  const now = `${p.generation} ${p.counts.failed} ${p.counts.error}`;
  if (now === grouped) return;
  const { errors } = await call(`${self}/errors`, { has: "errors" });
  $("#groups tbody").replaceChildren(...errors.map((g) =>
    el("tr", {}, el("td", { class: "number" }, count(g.count)), el("td", {}, kind(g.status)), el("td", {}, user(saidBy(g)), instance(g)),
      el("td", {}, g.sample_rows.slice(0, 5).map((n) => count(n)).join(", ")), el("td", {}, mayControl && again(g)))));
  grouped = now;
  drawControls(current);
}

/** One of the messages of a group that shows what they have in common. */
const instance = (g) => (saidBy(g) === g.message ? null : el("p", { class: "quiet" }, "For instance: ", user(g.message)));

/** The button that runs the rows of one group again. */
function again(group) {
  const button = el("button", { type: "button", "data-again": "", hidden: "" }, "Run these again");
  button.addEventListener("click", () => post(button, `${self}/retry?${new URLSearchParams({ status: group.status, message: group.message })}`));
  return button;
}
