// A new list: the file is looked at, its columns get their fields, all of it is checked, and then it is started. The file is sent
// for each of these steps; the server keeps nothing of it before the start.

import { attempt, download, look as lookInto, upload } from "./api.js";
import { $, $$, drawBar, el, errorTable, leave, setText, show, showProblem, user } from "./dom.js";
import { parts, t } from "./i18n.js";
import { acceptance, percents, rows, sentences } from "./words.js";

const form = $("#upload");
const KEPT = "="; // a column that stays a member of the item under its own name

/**
 * What is on the page. `file`: the one that was chosen; `said`: how it is read where that was chosen by hand; `look`: what the server
 * saw in it; `fit`: of its workers, the chosen one; `fields`: header -> field, empty for a column that is not used; `found`: the
 * result of the check of just this.
 */
const state = { file: null, said: {}, look: null, fit: null, fields: new Map(), found: null };

if (form) {
  const file = $("#file");
  file.disabled = false; // before this script a file would go nowhere
  file.addEventListener("click", () => { file.value = ""; }); // the corrected file may have the name of this one
  file.addEventListener("change", () => file.files.length && choose(file.files));
  form.addEventListener("submit", (event) => event.preventDefault());
  const over = (on) => (event) => { event.preventDefault(); $("#drop").classList.toggle("over", on); };
  for (const kind of ["dragenter", "dragover"]) document.addEventListener(kind, over(true));
  for (const kind of ["dragleave", "drop"]) document.addEventListener(kind, over(false));
  document.addEventListener("drop", (event) => event.dataTransfer.files.length && choose(event.dataTransfer.files));
  $("#worker").addEventListener("change", chooseWorker);
  for (const [id, name] of [["sheet", "sheet"], ["header-row", "header_row"], ["encoding", "encoding"]]) {
    $(`#${id}`).addEventListener("change", () => lookAs(name, $(`#${id}`).value));
  }
  $("#check").addEventListener("click", () => check({ byHand: true }));
  $("#start").addEventListener("click", start);
  $("#marked").addEventListener("click", saveMarked);
  $("#again").addEventListener("click", () => file.click());
  $("#stop").addEventListener("click", () => stop?.abort());
  window.addEventListener("beforeunload", (event) => { if (stop !== null) event.preventDefault(); });
  // A browser that goes back may have kept the file, without an event for it.
  window.addEventListener("pageshow", () => { if (file.files.length && state.file === null) choose(file.files); });
}

// -- Sending: one request at a time, with its share, and a way to end it ------------------------------------------------------

let stop = null;

/**
 * Does `work(signal)` with the bar and the button Cancel, in place of what is being sent, and shows in `box` why it is refused.
 * Returns whether it was done.
 */
async function send(box, button, work, onChoice = null) {
  stop?.abort();
  const own = new AbortController();
  stop = own;
  show($("#sending"), true);
  try {
    return await attempt(box, button, () => work(own.signal), onChoice);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    return false;
  } finally {
    if (stop === own) {
      stop = null;
      const held = document.activeElement === $("#stop");
      show($("#sending"), false);
      if (held) button.focus();
    }
  }
}

/** Draws the share that has gone, and after that what `then` happens, of which no share is known. */
const sending = (then) => (share) => {
  const whole = Math.floor(share * 100);
  const text = whole < 100 ? t("Sending: {percent}", { percent: percents(whole) }) : then;
  drawBar($("#sending-bar"), [["finish", whole < 100 ? share : 0]], { percent: whole < 100 ? whole : null, text });
  setText($("#sending-text"), text);
};

function size(bytes) {
  const units = [t("bytes"), "KiB", "MiB", "GiB"];
  let n = bytes;
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i += 1; }
  return `${i ? n.toFixed(1) : n} ${units[i]}`;
}

// -- The file and how it is read -------------------------------------------------------------------------------------------------

async function choose(files) {
  const problem = (detail) => showProblem($("#problem"), { detail });
  if (files.length > 1) return problem(t("You dropped {n} files; a list is one. Drop them one after the other.", { n: files.length }));
  const [file] = files;
  const limit = Number(form.dataset.maxBytes);
  if (file.size > limit) return problem(t("{file} has {size}; at most {limit} are taken. Split it into several files.", { file: file.name, size: size(file.size), limit: size(limit) }));
  Object.assign(state, { file, said: {} });
  setText($("#file-name"), file.name);
  setText($("#file-about"), size(file.size));
  $("#drop").classList.add("chosen");
  return look();
}

/** Reads the file with one thing chosen by hand. Another sheet has another header. */
async function lookAs(name, value) {
  state.said = name === "sheet" ? { ...state.said, sheet: value, header_row: undefined } : { ...state.said, [name]: value };
  await look();
}

async function look() {
  forget();
  const before = state.look === null ? null : headers(state.look);
  const done = await send($("#problem"), $("#file"), async (signal) => {
    const fields = body({ columns: before === null ? "" : columns() });
    state.look = await lookInto(form.dataset.preview, fields, sending(t("Sent; the columns are being read…")), { signal, has: "columns" });
  }, lookAs);
  if (!done) {
    if (stop === null) show($("#columns-card"), false);
    return;
  }
  const same = before !== null && state.fit !== null && String(before) === String(headers(state.look));
  if (same) state.fit = fitOf(state.fit.worker); // the corrected file keeps its worker and its fields
  else pick((before === null && $("#worker").value) || state.look.suggested || ""); // a browser that goes back keeps the choice
  draw();
  if (same || isPlain()) await check({ byHand: false });
}

const headers = (found) => found.columns.map((each) => each.header);
const fitOf = (worker) => state.look.workers.find((each) => each.worker === worker) ?? null;

/** Nothing is left to choose: all columns that the worker requires are there, under their names or as in an earlier list. */
const isPlain = () => state.fit !== null && missing().length === 0
  && (state.fit.remembered !== null || Object.keys(state.fit.columns).length === 0);

async function chooseWorker() {
  pick($("#worker").value);
  draw();
  if (isPlain()) await check({ byHand: false });
}

/** A form with the file, how it is read, and `more` fields. */
function body(more = {}) {
  const fields = new FormData();
  fields.set("file", state.file);
  for (const [name, value] of Object.entries({ ...state.said, ...more })) {
    if (value !== undefined && value !== null && value !== "") fields.set(name, value);
  }
  return fields;
}

// -- The fields of the columns ---------------------------------------------------------------------------------------------------

/** Chooses a worker, and for each column the field that the server proposes. */
function pick(worker) {
  forget();
  state.fit = fitOf(worker);
  state.fields = new Map();
  if (state.fit === null) return;
  const used = new Set();
  for (const header of headers(state.look)) {
    const field = state.fit.columns[header] ?? named(header);
    state.fields.set(header, field !== KEPT && used.has(field) ? "" : field);
    used.add(field);
  }
}

/** The field that a column has without the option `columns`. */
const named = (header) => state.fit.matched[header] ?? (state.fit.fields.length ? "" : KEPT);

const missing = () => {
  const used = new Set(state.fields.values());
  return state.fit.fields.filter((field) => field.required && !used.has(field.name));
};

/** The option `columns`: what differs from the names. */
function columns() {
  const said = [...state.fields].filter(([header, field]) => field !== named(header));
  return isTable() && said.length ? JSON.stringify(Object.fromEntries(said)) : "";
}

const isTable = () => state.look.header_row !== null;

function draw() {
  const { look: found, fit } = state;
  show($("#columns-card"), true);
  options($("#sheet"), found.sheets.map((name) => [name, name]), found.sheet, found.sheets.length > 1);
  options($("#header-row"), found.first_rows.map(({ row, cells }) => [row, t("Row {row}: ", { row }) + cells.join(", ").slice(0, 60)]), found.header_row, isTable());
  showField($("#encoding"), found.encoding !== null);
  if (found.encoding !== null) setEncoding(found.encoding);
  $("#worker").value = fit?.worker ?? "";
  setText($("#worker-about"), (fit?.doc ?? "").trim().split("\n\n")[0]);
  setText($("#mapping-about"), aboutFields());
  $("#mapping tbody").replaceChildren(...found.columns.map(column));
  drawMissing();
}

const showField = (input, on) => show(input.closest(".field"), on);

function options(select, choices, chosen, on) {
  showField(select, on);
  select.replaceChildren(...choices.map(([value, text]) => el("option", { value }, text)));
  select.value = String(chosen ?? "");
}

/** The encoding that the server found, or was told. */
function setEncoding(name) {
  const select = $("#encoding");
  if (![...select.options].some((each) => each.value === name)) select.append(el("option", { value: name }, name));
  select.value = name;
}

function aboutFields() {
  const { look: found, fit } = state;
  if (found.error !== null) return sentences(found.error.message, t("Choose the row with the names of the columns above."));
  if (fit === null) return t("The columns do not say what should be done with each row: choose it above.");
  if (fit.remembered !== null) return t("The fields are those of Task {task}, the last list with these columns.", { task: fit.remembered });
  if (Object.keys(fit.columns).length) return t("Some fields are proposed because their names are similar: look at them before you go on.");
  return "";
}

function column({ header, letters, samples }) {
  const proposed = state.fit !== null && state.fit.remembered === null && header in state.fit.columns;
  return el("tr", { class: proposed ? "proposed" : null },
    el("th", { scope: "row" }, user(header), letters && el("small", {}, ` ${letters}`)),
    el("td", {}, el("ul", { class: "samples" }, samples.map((text) => el("li", {}, user(text, { class: "user value" }))))),
    el("td", {}, fieldOf(header), proposed && el("small", {}, t("similar name"))));
}

function fieldOf(header) {
  if (state.fit === null) return "–";
  const { fields } = state.fit;
  if (!isTable()) return user(fields.find((field) => field.name === state.fit.matched[header])?.title ?? header);
  const choices = fields.map(({ name, title, required }) => [name, required ? t("{field} (required)", { field: title }) : title]);
  if (fields.length === 0) choices.push([KEPT, t("As it is")]);
  const select = el("select", { "aria-label": t("Field of {column}", { column: header }), dir: "auto" },
    el("option", { value: "" }, t("Not used")), choices.map(([value, text]) => el("option", { value }, text)));
  select.value = state.fields.get(header);
  select.addEventListener("change", () => assign(header, select.value));
  return select;
}

/** Gives a column a field; the column that had it before is not used any more. */
function assign(header, field) {
  forget();
  for (const [other, theirs] of state.fields) {
    if (theirs !== field || field === KEPT || field === "") continue;
    state.fields.set(other, "");
    const select = $$("#mapping select").find((each) => each.getAttribute("aria-label") === t("Field of {column}", { column: other }));
    if (select) select.value = "";
  }
  state.fields.set(header, field);
  const select = $$("#mapping select").find((each) => each.getAttribute("aria-label") === t("Field of {column}", { column: header }));
  select.value = field;
  drawMissing();
}

/** What keeps the list from being checked: no worker, no header, a required field without a column. */
function drawMissing() {
  const names = state.fit === null ? [] : missing().map((field) => field.title);
  const box = $("#missing");
  show(box, names.length > 0);
  const fields = names.flatMap((name, i) => [i ? t(", ") : "", user(name)]);
  box.replaceChildren(...(names.length === 1
    ? parts("This field needs a column: {fields}. Choose it beside one of your columns.", { fields })
    : parts("These fields need a column: {fields}. Choose it beside one of your columns.", { fields })), " ", state.look.sheets.length > 1
    ? t("If none has it, choose another sheet above, or something else to do with each row.")
    : t("If none has it, choose above something else to do with each row."));
  show($("#check"), state.fit !== null && state.look.error === null && names.length === 0 && state.found === null);
}

// -- The check, and the start ------------------------------------------------------------------------------------------------------

/** What was checked, or is being checked, is not what is on the page any more. */
function forget() {
  stop?.abort();
  state.found = null;
  setText($("#said"), "");
  show($("#result-card"), false);
}

/** All that says what the list is: the same for the check, the marked workbook and the start. */
const list = (more) => body({
  worker: state.fit.worker, sheet: state.look.sheet, header_row: state.look.header_row, columns: columns(), ...more,
});

const TOO_LONG = ["dry_run_timeout"];

async function check({ byHand }) {
  showProblem($("#start-problem"), null);
  const done = await send($("#problem"), $("#check"), async (signal) => {
    try {
      state.found = await upload(form.action, list({ dry_run: true }), sending(t("Sent; the rows are being checked…")), { signal, effect: "none" });
    } catch (error) {
      if (!TOO_LONG.includes(error.problem?.code)) throw error;
      state.found = { unchecked: error.problem.detail };
    }
  }, lookAs);
  if (!done) return drawMissing();
  drawResult();
  if (byHand) $("#result").focus();
}

function drawResult() {
  const { found } = state;
  const rejected = found.rejected ?? 0;
  show($("#result-card"), true);
  show($("#check"), false);
  for (const id of ["#result", "#said"]) setText($(id), found.unchecked ? t("The list is too long to be checked before the start.") : acceptance(found));
  $("#faults").replaceChildren(...(found.unchecked ? [el("p", {}, user(found.unchecked))] : []), ...faults(found));
  const taken = found.unchecked !== undefined || found.accepted > 0;
  show($("#start"), taken);
  setText($("#start"), rejected ? t("Start with {rows}", { rows: rows(found.accepted) }) : t("Start"));
  show($("#options"), taken);
  show($("#marked"), rejected > 0);
  show($("#again"), rejected > 0);
}

function faults({ errors = [], errors_truncated: more = false }) {
  if (errors.length === 0) return [];
  return [errorTable(errors, errors.length), ...(more ? [el("p", { class: "quiet" }, t("More rows have faults; the marked workbook shows all of them."))] : [])];
}

async function start() {
  const inputs = $$("#options input");
  if (inputs.some((input) => !input.reportValidity())) return;
  const knobs = Object.fromEntries(inputs.map((input) => [input.name, input.type === "checkbox" ? (input.checked ? input.value : "") : input.value]));
  if (knobs.start_at) knobs.start_at = new Date(knobs.start_at).toISOString();
  let task = null;
  const others = [$("#columns-card"), form];
  for (const each of others) each.inert = true; // what is started is what was checked
  await send($("#start-problem"), $("#start"), async (signal) => {
    task = await upload(form.action, list(knobs), sending(t("Sent; the first rows are being read…")), { signal });
  });
  if (task !== null) await leave(task.links.ui);
  for (const each of others) each.inert = false;
}

async function saveMarked() {
  await send($("#start-problem"), $("#marked"), async (signal) => {
    sending(t("The marked workbook is being made…"))(1);
    const url = URL.createObjectURL(await download(form.dataset.marked, list({}), signal));
    el("a", { href: url, download: `${state.file.name.replace(/\.[^.]*$/, "")} marked.xlsx` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  });
}
