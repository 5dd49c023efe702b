// A Task's own page: its bar, its knobs, its failures. Everything moves without a reload.

import { Poller, Refused, call, upload } from "./api.js";
import { $, $$, cells, drawBar, el, setText, show, showProblem, user } from "./dom.js";
import { CALLBACKS, CALLED, COUNTS, KINDS, STATES, count, pace, percent, reached, rows, segments, sentence, when } from "./words.js";

const id = $("#task").dataset.id;
const self = `${document.body.dataset.api}/${id}`;
const PAGE = 20;

const poller = new Poller(self, {
  onData: draw,
  onGone: () => setText($("#words"), "This Task is not there any more."),
}).start();

function draw(p) {
  $("#task").setAttribute("aria-busy", "false");
  noteMove(p);
  drawHead(p);
  drawCounts(p);
  drawControls(p);
  drawKnobs(p);
  drawReports(p);
  drawCorrections(p);
  drawTables(p);
  drawRefusal(p).catch(() => { refused = ""; });
}

// -- How far it is -----------------------------------------------------------------------------------------------------

let said = "";

function drawHead(p) {
  const title = p.title || `Task ${p.task_id}`;
  setText($("#task-title"), title);
  document.title = `${p.progress.percent === null ? "" : `${Math.floor(p.progress.percent)} % · `}${title}`;
  const badge = $("#state");
  setText(badge, STATES[p.state] ?? p.state);
  badge.className = `badge ${p.state === "finished" && p.counts.failed + p.counts.error > 0 ? "finished-with-failures" : p.state}`;
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
  const { reasons } = await call(`${self}/waiting`).catch(() => ({ reasons: [] }));
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
  retry: (p) => (["running", "finished"].includes(p.state) || (p.state_reason === "too_many_failures" && p.split.state !== "splitting")) && p.counts.failed + p.counts.error > 0,
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

async function post(button, path) {
  await attempt(async () => {
    button.disabled = true;
    try {
      draw(await call(path, { method: "POST" }));
    } finally {
      button.disabled = false;
    }
  });
}

function sure() {
  const dialog = $("#confirm");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

/** Does it, shows the problem where it is refused (`onChoice` as of `showProblem`), and looks again at once. */
async function attempt(work, onChoice = null) {
  showProblem($("#problem"), null);
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    showProblem($("#problem"), error.problem, onChoice);
  }
  poller.now();
}

// -- Knobs -------------------------------------------------------------------------------------------------------------

const knobs = $("#knobs");
let edited = false;
knobs.addEventListener("input", () => { edited = true; });
knobs.addEventListener("submit", async (event) => {
  event.preventDefault();
  setText($("#knobs-said"), "");
  await attempt(async () => {
    const parallel = knobs.parallel.value === "" ? null : Number(knobs.parallel.value);
    const interval = Number(knobs.interval.value);
    const tolerated = knobs.tolerated_failures.value.trim();
    const body = { parallel, interval, priority: Number(knobs.priority.value), tolerated_failures: tolerated === "" ? null : tolerated };
    const p = await call(self, { method: "PATCH", body });
    edited = false;
    draw(p);
    setText($("#knobs-said"), "Applied; jobs that start from now on follow it.");
  });
});

function drawKnobs(p) {
  // What somebody is typing is not overwritten under their hands.
  if (!edited) {
    const { parallel, interval, priority, tolerated_failures: tolerated } = p.control;
    if (knobs.interval.value !== String(interval)) knobs.interval.value = interval;
    if (knobs.tolerated_failures.value !== String(tolerated ?? "")) knobs.tolerated_failures.value = tolerated ?? "";
    knobs.parallel.placeholder = interval > 0 ? "1" : "no limit";
    if (knobs.parallel.value !== String(parallel ?? "")) knobs.parallel.value = parallel ?? "";
    if (knobs.priority.value !== String(priority)) knobs.priority.value = priority;
  }
  for (const field of knobs.elements) field.disabled = p.done;
  const facts = [
    ["Worker", p.worker], ["In flight (queued or running)", count(p.control.in_flight)], ["Handed in", when(p.created_at)], ["Began", when(p.started_at)],
    ["Ended", when(p.finished_at)], ["Rows not taken", count(p.split.rejected)], ["Waiting for another try", count(p.retrying)],
    ...p.callbacks.map((each) => [CALLBACKS[each.name], `${each.worker}: ${CALLED[each.status] ?? "not called"}`]),
  ];
  const box = $("#facts");
  facts.forEach(([name, value], i) => {
    const pair = box.children[i] ?? box.appendChild(el("div", {}, el("dt", {}, name), el("dd", { dir: "auto" })));
    setText($("dd", pair), value);
  });
}

// -- Reports -----------------------------------------------------------------------------------------------------------

const REPORTS = [
  ["failed", "Rows to correct", (p) => p.counts.failed + p.counts.error + p.split.rejected],
  ["succeeded", "Rows that succeeded", (p) => p.counts.finish],
  ["unprocessed", "Rows not processed", (p) => (p.done ? p.counts.cancelled : 0)],
];

function drawReports(p) {
  const box = $("#reports");
  let some = false;
  for (const [kind, word, number] of REPORTS) {
    let item = $(`[data-rows="${kind}"]`, box);
    if (!item) {
      const link = (suffix) => el("a", { class: "button", href: `${self}/report.${suffix}?rows=${kind}`, download: true, "aria-label": `${word}, as ${suffix}` }, suffix);
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
      const link = el("a", { class: "button", href: p.links.result, download: true }, p.result.format);
      item = el("li", { "data-rows": "result" }, el("span", { class: "grow" }, "The export ", el("span", { class: "quiet number" })), link);
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

function drawCorrections(p) {
  correct.dataset.worker = p.worker;
  show(correct, p.worker !== "*" && REPORTS[0][2](p) + REPORTS[2][2](p) > 0);
  const link = (task) => el("a", { href: new URL(task, location.href).pathname }, `Task ${task}`);
  const box = $("#corrections");
  const now = JSON.stringify([p.resubmit_of, p.resubmitted_by, p.mended]);
  if (box.dataset.now === now) return;
  box.dataset.now = now;
  box.replaceChildren(
    ...(p.resubmit_of === null ? [] : ["These rows correct those of ", link(p.resubmit_of), ". "]),
    ...(p.resubmitted_by.length ? ["Corrected with ", ...p.resubmitted_by.flatMap((task, i) => [i ? ", " : "", link(task)]), ": "] : []),
    ...(p.resubmitted_by.length || p.mended ? [`${rows(p.mended)} mended since.`] : []),
  );
  show(box, box.childNodes.length > 0);
}

correct.addEventListener("submit", (event) => {
  event.preventDefault();
  sendCorrected({});
});

function sendCorrected(options) {
  const button = $("button", correct);
  attempt(async () => {
    button.disabled = true;
    try {
      const fields = new FormData(correct);
      fields.set("worker", correct.dataset.worker);
      fields.set("resubmit_of", id);
      for (const [name, value] of Object.entries(options)) fields.set(name, value);
      const task = await upload(document.body.dataset.api, fields, () => {});
      window.location.assign(task.links.ui);
    } finally {
      button.disabled = false;
    }
  }, (name, value) => sendCorrected({ ...options, [name]: value }));
}

// -- Failures ----------------------------------------------------------------------------------------------------------

/** A table that is read page by page, forward and back, and looked at again only when its number of rows has changed. */
class Pages {
  constructor(name, url, items, row) {
    Object.assign(this, { name, url, items, row, starts: [null], next: null, seen: -1, busy: false });
    const button = (word, step) => {
      const node = el("button", { type: "button", class: "ghost" }, word);
      node.addEventListener("click", () => this.turn(step));
      return node;
    };
    [this.back, this.place, this.on] = [button("← Earlier", -1), el("span", { class: "quiet" }), button("Later →", 1)];
    this.back.hidden = this.on.hidden = true;
    $(`[data-pager="${name}"]`).append(this.back, this.place, this.on);
  }

  update(number) {
    show($(`#${this.name}-card`), number > 0);
    if (number === this.seen || this.busy) return;
    if (number < this.seen) this.starts = [null]; // run again: the page that was open may be gone
    this.number = number;
    if (number > 0) this.load(number);
    else this.seen = number;
  }

  turn(step) {
    if (this.busy) return;
    if (step > 0) this.starts.push(this.next);
    else this.starts.pop();
    this.load(this.number);
  }

  async load(number) {
    this.busy = true;
    try {
      const after = this.starts.at(-1);
      const page = await call(`${this.url}limit=${PAGE}${after === null ? "" : `&after=${after}`}`);
      this.fill(page, number);
      this.seen = number;
    } catch (error) {
      if (!(error instanceof Refused)) throw error; // the next poll comes back to it
    } finally {
      this.busy = false;
    }
  }

  fill(page, number) {
    $(`#${this.name} tbody`).replaceChildren(...page[this.items].map(this.row));
    this.next = page.links.next === null ? null : new URL(page.links.next, location.href).searchParams.get("after");
    const first = (this.starts.length - 1) * PAGE;
    setText(this.place, `${count(first + 1)}–${count(first + page[this.items].length)} of ${count(number)}`);
    this.back.disabled = this.starts.length === 1;
    this.on.disabled = this.next === null;
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

let refused = "";

/** What is wrong with a list that was refused as a whole: its columns, say. Its rows have a table of their own. */
async function drawRefusal(p) {
  const now = p.state === "rejected" ? `${p.task_id} ${p.version}` : "";
  if (now === refused || p.state !== "rejected" || p.split.rejected > 0) return;
  refused = now;
  const { refusal } = await call(`${self}?include=errors`);
  if (refusal?.errors.length) showProblem($("#problem"), { detail: refusal.message, errors: refusal.errors });
}

let grouped = "";

function drawTables(p) {
  const bad = p.counts.failed + p.counts.error;
  failed.update(bad);
  rejected.update(p.split.rejected);
  show($("#groups-card"), bad > 0);
  const now = `${p.generation} ${p.counts.failed} ${p.counts.error}`;
  if (now === grouped) return;
  grouped = now;
  drawGroups(p).catch(() => { grouped = ""; });
}

async function drawGroups(p) {
  const { errors } = await call(`${self}/errors`);
  $("#groups tbody").replaceChildren(...errors.map((g) =>
    el("tr", {}, el("td", { class: "number" }, count(g.count)), el("td", {}, kind(g.status)), el("td", {}, user(g.message)),
      el("td", {}, g.sample_rows.slice(0, 5).map((n) => count(n)).join(", ")), el("td", {}, again(g)))));
  drawControls(p);
}

/** The button that runs the rows of one group again. */
function again(group) {
  const button = el("button", { type: "button", "data-again": "", hidden: "" }, "Run these again");
  button.addEventListener("click", () => post(button, `${self}/retry?${new URLSearchParams({ status: group.status, message: group.message })}`));
  return button;
}
