// The rows of a Task, page by page, in the columns of its list; and what is done with those that somebody has chosen.

import { attempt, call, linked } from "./api.js";
import { $, arrange, el, mixed, pager, plain, setText, show, user } from "./dom.js";
import { t } from "./i18n.js";
import { FILTERS, KINDS, SHARDS, STATUSES, count, heard, rows } from "./words.js";

const PAGE = 20;
/** As many rows as the API takes by their numbers. */
const MOST = 200;
/** Columns that are shown; a list may have thousands. */
const WIDE = 40;
/** Of a table that moves, a tenth of the time at most is spent on loading it. */
const REST = 9;

/** The address of a job's page. */
export const place = (job) => linked(`${document.body.dataset.page}jobs/${encodeURIComponent(job)}`);

export const kind = (status) => el("span", { class: `badge ${status}` }, KINDS[status] ?? STATUSES[status] ?? status);

export const reasons = (rejected) => el("ul", { class: "reasons" }, rejected.errors.map((e) =>
  el("li", {}, e.column === null ? null : [user(e.column, { class: "user name" }), t(": ")], user(e.message))));

// -- Columns -----------------------------------------------------------------------------------------------------------

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** The columns of items, each as [name in the item, header]: first those that are known, then others that an item has. */
export function columnsOf(known, items) {
  // Items without names are a column of their own; those of an export have none.
  const named = items.length === 0 || items.some(isObject);
  const found = new Map(named ? known.map(({ name, header }) => [name, header]) : []);
  for (const item of items) for (const name of isObject(item) ? Object.keys(item) : []) if (!found.has(name)) found.set(name, name);
  if (items.some((item) => item !== null && !isObject(item))) found.set("", t("Item"));
  return [...found].slice(0, WIDE);
}

const cell = (value) => (value === null || value === undefined || value === "" ? null : user(plain(value)));

/** The cells of an item. `faulty`: names of those to be marked. */
export const line = (columns, item, faulty = new Set()) => columns.map(([name]) =>
  el("td", { class: faulty.has(name) ? "faulty" : null }, cell(isObject(item) ? item[name] : name === "" ? item : null)));

// -- Pages -------------------------------------------------------------------------------------------------------------

/** A table that is read page by page, forward and back, and loaded again only when what it shows has changed. */
export class Pages {
  /** `later(ms)`: has `update` called again. */
  constructor(name, url, items, fill, later) {
    Object.assign(this, { url, items, fill, later, starts: [null], from: null, next: null, number: 0, seen: null, rest: 0, loading: Promise.resolve() });
    this.where = el("span", { class: "quiet" });
    this.drawPager = pager($(`[data-pager="${name}"]`), (button, step) => this.turn(button, step), [this.where]);
  }

  /** Does one thing after the other: each begins with what the one before it has left. */
  inTurn(work) {
    const done = this.loading.then(work);
    this.loading = done.catch(() => {});
    return done;
  }

  /** `number`: how many rows there are, null if that is unknown; `state`: all that the page depends on. */
  update(number, state = String(number)) {
    return this.inTurn(async () => {
      if (state === this.seen) return;
      // A search of a large Task takes long, and is not asked for at each change.
      const wait = this.seen === null ? 0 : this.rest - Date.now();
      if (wait > 0) {
        this.later(wait);
        return;
      }
      // Rows that run again: the page that was open may be gone.
      if (number !== null && number < this.number) this.reset();
      this.number = number;
      if (await this.open(this.starts)) this.seen = state;
    });
  }

  /** Begins anew: other rows are asked for, those behind `after` if it is given. */
  reset(after = null) {
    Object.assign(this, { starts: after === null ? [null] : [null, after], from: after, next: null, seen: null, number: 0 });
  }

  turn(button, step) {
    return this.inTurn(async () => {
      if (step > 0 ? this.next === null : this.starts.length < 2) return; // what was open at the click is gone
      const starts = step > 0 ? [...this.starts, this.next] : this.starts.slice(0, -1);
      await attempt($("#problem"), button, () => this.open(starts));
      this.enable();
    });
  }

  /** Loads a page, which is the last of these starts. Returns whether it is shown: others may be asked for meanwhile. */
  async open(starts) {
    const [before, began, after] = [this.starts, Date.now(), starts.at(-1)];
    const page = await call(`${this.url()}limit=${PAGE}${after === null ? "" : `&after=${after}`}`, { has: this.items });
    if (before !== this.starts) return false;
    this.starts = starts;
    this.next = page.links.next === null ? null : new URL(page.links.next, location.href).searchParams.get("after");
    this.fill(page);
    this.draw(page[this.items].length);
    this.rest = Date.now() + REST * (Date.now() - began);
    return true;
  }

  enable() {
    this.drawPager(this.starts.length > 1, this.next !== null);
  }

  draw(length) {
    const first = (this.starts.length - 1) * PAGE;
    const shown = `${count(first + 1)}–${count(first + length)}`;
    const unknown = length === 0 || this.number === null || (this.from !== null && this.starts.length > 1);
    setText(this.where, unknown ? "" : t("{shown} of {total}", { shown, total: count(this.number) }));
    this.enable();
  }
}

// -- The rows ----------------------------------------------------------------------------------------------------------

/** What its last message says, where that explains the status. */
function reason(event) {
  if (!["failed", "error", "enqueue"].includes(event.status)) return "";
  const last = event.messages.findLast((m) => m.status === event.status) ?? event.messages.at(-1);
  return last?.message ?? "";
}

const keyOf = (event) => `${event.id}.${event.row}`;

/**
 * The table of rows. `self`: the Task in the API; `of`: what its items are; `choose`: has the address name a filter; `report`:
 * makes a link a download; `later`: of Pages; `retry`: runs a path of the Task for a button, null if the reader may not; `mayRetry`: whether the
 * Task takes a retry.
 */
export class Rows {
  constructor({ self, of, choose, report, later, retry, mayRetry }) {
    Object.assign(this, { self, of, retry, mayRetry, status: "", text: "", from: null, columns: [], settled: false, shown: new Map(), heads: "", progress: null });
    /** The chosen rows: number and status as it was last seen. */
    this.chosen = new Map();
    this.form = $("#filter");
    this.form.status.append(...FILTERS.map(([value, word]) => el("option", { value }, word)));
    const ask = () => {
      const query = new URLSearchParams();
      if (this.form.status.value) query.set("status", this.form.status.value);
      if (this.form.text.value.trim()) query.set("text", this.form.text.value.trim());
      choose(query);
    };
    this.form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
    this.form.status.addEventListener("change", ask);
    this.pages = new Pages("rows", () => `${self}/events?${this.query()}&`, "events", (page) => this.fill(page), later);
    $("#rows").addEventListener("change", (event) => this.tick(event.target));
    $("#chosen-none").addEventListener("click", () => { this.chosen.clear(); this.drawChosen(); $("#panel-rows").focus(); });
    report($("#chosen-report"), () => this.report());
    $("#chosen-retry")?.addEventListener("click", () => this.again());
  }

  /** Shows the rows that a query of the address asks for. */
  filter(query) {
    const [status, text] = [query.get("status") ?? "", query.get("text") ?? ""];
    const from = /^\d{1,15}$/.test(query.get("from") ?? "") ? query.get("from") : null;
    this.form.status.value = status;
    if (this.form.status.selectedIndex < 0) this.form.status.value = "";
    this.form.text.value = text;
    if (this.form.status.value === this.status && text === this.text && from === this.from) return;
    Object.assign(this, { status: this.form.status.value, text, from });
    this.chosen.clear();
    this.drawChosen();
    this.pages.reset(from === null ? null : `${from}.0`); // that job, before its first row
  }

  /** The file of the chosen rows. */
  report() {
    return `${this.self}/report.xlsx?rows=all&only_rows=${[...this.chosen.keys()].join(",")}`;
  }

  query() {
    const query = new URLSearchParams();
    if (this.status) query.set("status", this.status);
    if (this.text) query.set("text", this.text);
    return query;
  }

  async update(p) {
    this.progress = p;
    this.drawChosen();
    if (!this.settled) {
      this.columns = (await call(`${this.self}/columns`, { has: "columns" })).columns;
      this.settled = p.done;
    }
    const statuses = this.status ? this.status.split(",") : Object.keys(STATUSES);
    const numbers = statuses.map((each) => p.counts[each]);
    const number = numbers.reduce((sum, n) => sum + n, 0);
    // The same numbers are not the same rows after a retry, or if the rows were read later than the progress.
    const version = (p.done || (statuses.includes("enqueue") && p.retrying > 0)) && p.version;
    await this.pages.update(this.text ? null : number, JSON.stringify([p.generation, numbers, version, this.status, this.text]));
  }

  fill({ events, links }) {
    this.drawHead(columnsOf(this.columns, events.map((e) => e.params)));
    const before = this.shown;
    this.shown = new Map(events.map((e) => {
      const kept = before.get(keyOf(e));
      const state = JSON.stringify([e.status, e.attempt, reason(e), this.heads]);
      return [keyOf(e), kept?.state === state ? kept : { state, node: this.line(e) }];
    }));
    const held = [...before].find(([, { node }]) => node.contains(document.activeElement));
    const tag = document.activeElement.tagName;
    arrange($("#rows tbody"), [...this.shown.values()].map(({ node }) => node));
    if (held && document.activeElement === document.body) ($(tag, this.shown.get(held[0])?.node ?? el("i")) ?? $("#rows-box")).focus();
    for (const e of events) if (this.chosen.has(e.row)) this.chosen.set(e.row, e.status);
    this.drawChosen();
    show($("#rows-box"), events.length > 0);
    setText($("#rows-said"), this.words(events.length, links.next !== null));
  }

  words(length, more) {
    if (length === 0) return this.status || this.text ? t("Nothing fits this.") : t("There is nothing yet.");
    return this.text && more ? t("There may be more.") : "";
  }

  drawHead(columns) {
    const heads = JSON.stringify(columns);
    if (heads === this.heads) return;
    this.heads = heads;
    this.shownColumns = columns;
    const every = el("input", { type: "checkbox", "aria-label": t("Choose all of this page"), "data-every": "" });
    const words = [this.of === SHARDS ? t("Shard") : t("Row"), t("Status"), t("Reason")];
    $("#rows thead tr").replaceChildren(
      el("th", { scope: "col", class: "tick" }, every), ...words.map((word, i) => el("th", { scope: "col", class: i === 0 ? "number" : null }, word)),
      ...columns.map(([, header]) => el("th", { scope: "col" }, user(header))), el("th", { scope: "col", class: "number" }, t("Attempts")));
  }

  line(e) {
    const name = e.row === null ? t("job") : count(e.row);
    const tick = e.row === null ? null : el("input", { type: "checkbox", "data-row": e.row, "data-status": e.status, "aria-label": t("Choose {row}", { row: name }), checked: this.chosen.has(e.row) });
    return el("tr", {},
      el("td", { class: "tick" }, tick), el("td", { class: "number" }, el("a", { href: place(e.job_id), "aria-label": t("{row}: its job", { row: name }) }, name)),
      el("td", {}, kind(e.status)), el("td", { "data-cell": "reason" }, reason(e) ? mixed("span", heard(reason(e))) : null),
      line(this.shownColumns, e.params), el("td", { class: "number", "data-cell": "attempt" }, count(e.attempt)));
  }

  // -- The chosen rows

  ticks() {
    return [...document.querySelectorAll("#rows [data-row]")];
  }

  tick(box) {
    const changed = "every" in box.dataset ? this.ticks() : [box];
    for (const each of changed) {
      if (!box.checked) this.chosen.delete(Number(each.dataset.row));
      else if (this.chosen.size < MOST) this.chosen.set(Number(each.dataset.row), each.dataset.status);
    }
    this.drawChosen();
  }

  drawChosen() {
    for (const each of this.ticks()) each.checked = this.chosen.has(Number(each.dataset.row));
    const every = $("#rows [data-every]");
    if (every) every.checked = this.ticks().length > 0 && this.ticks().every((each) => each.checked);
    const n = this.chosen.size;
    show($("#chosen"), n > 0);
    $("#chosen-report").href = linked(this.report());
    setText($("#chosen-count"), n === 0 ? "" : n === MOST ? t("{rows} chosen, the most that can be at once", { rows: rows(n, this.of) }) : t("{rows} chosen", { rows: rows(n, this.of) }));
    const button = $("#chosen-retry");
    if (!button) return;
    const ended = this.retried().length;
    setText(button, ended === n ? t("Run them again") : t("Run {n} of them again", { n: count(ended) }));
    show(button, ended > 0 && this.progress !== null && this.mayRetry(this.progress));
  }

  /** The chosen rows that can run again. */
  retried() {
    return [...this.chosen].filter(([, status]) => ["failed", "error", "cancelled"].includes(status)).map(([row]) => row);
  }

  async again() {
    const path = `retry?status=failed,error,cancelled&only_rows=${this.retried().join(",")}`;
    if (!(await this.retry($("#chosen-retry"), path))) return;
    this.chosen.clear();
    this.drawChosen();
    $("#panel-rows").focus();
  }
}
