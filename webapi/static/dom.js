// Building and filling elements. Data goes in as text only: nothing here, or anywhere, sets innerHTML.

import { ofCode, parts, t } from "./i18n.js";
import { KNOBS, ago, when } from "./words.js";

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** An element with attributes and children; `undefined`, `null` and `false` are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((c) => c !== undefined && c !== null && c !== false));
  return node;
}

/** Text of users: in its own direction, whatever surrounds it. */
export const user = (value, attributes = {}) => el("span", { dir: "auto", class: "user", ...attributes }, String(value ?? ""));

/** What the server says in English alone. */
export const english = (text) => el("span", { lang: "en", dir: "auto", class: "user" }, text);

/** Why an action skipped a job, within a sentence: by its code in the language of the page, with the English words after it. */
export function whySkipped({ code, reason = "" } = {}) {
  const said = ofCode(code);
  return said === undefined ? english(reason) : parts("{reason} ({english})", { reason: said.replace(/[。.]$/, ""), english: english(reason) });
}

const PARTS = { "\u2066": english, "\u2068": user };

/** Shows a text of words.js, with an element for each part of it between marks. */
export function drawMixed(node, text) {
  if (node.dataset.mixed === text) return; // what somebody has selected stays
  node.dataset.mixed = text;
  node.replaceChildren(...text.split(/([\u2066\u2068].*?\u2069)/s).map((part) => PARTS[part[0]]?.(part.slice(1, -1)) ?? part));
}

/** The same in a new element. */
export function mixed(tag, text) {
  const node = el(tag);
  drawMixed(node, text);
  return node;
}

/** A moment: how long ago, or in how long, kept fresh by frame.js, with the exact time as its title. */
export const moment = (text) => (text ? freshen(el("time", { datetime: text, title: when(text) })) : "–");

export function freshen(node) {
  setText(node, ago(node.getAttribute("datetime")));
  return node;
}

/**
 * Asks once, in the dialog of confirm.html; resolves to whether `yes` was clicked. The focus goes back to where it was. `no`: what keeps all
 * as it is.
 */
export function sure(heading, text, yes, no = t("Keep it")) {
  setText($("#confirm-heading"), heading);
  setText($("#confirm-text"), text);
  setText($("#confirm-yes"), yes);
  setText($("#confirm-no"), no);
  const dialog = $("#confirm");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

/**
 * Fills the body of a table with a row for each of `items`. Rows are kept by `key(item)` as long as they are shown: whoever stands on one with
 * the keyboard stays there. `make(item)` builds a row, `fill(row, item)` writes what changes.
 */
export function rowsOf(body, { key, make, fill }) {
  const kept = new Map();
  return (items) => {
    const wanted = new Set(items.map(key));
    for (const [name, row] of kept) {
      if (wanted.has(name)) continue;
      row.remove();
      kept.delete(name);
    }
    items.forEach((item, i) => {
      if (!kept.has(key(item))) kept.set(key(item), make(item));
      const row = kept.get(key(item));
      if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
      fill(row, item);
    });
  };
}

export function setText(node, value) {
  const text = String(value ?? "");
  if (node.textContent !== text) node.textContent = text;
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** Makes `nodes` the children of `parent`. A node that stays in its place is not touched: it keeps the keyboard. */
export function arrange(parent, nodes) {
  nodes.forEach((node, i) => parent.children[i] !== node && parent.insertBefore(node, parent.children[i] ?? null));
  while (parent.children.length > nodes.length) parent.lastElementChild.remove();
}

/** Redraws what is in `box`; the keyboard, if it was on something that is gone now, goes to `rest`. */
export function redraw(box, rest, draw) {
  const inside = box.contains(document.activeElement);
  draw();
  if (inside && !box.contains(document.activeElement)) rest.focus();
}

/** Goes to another page. Ends only when a browser shows this one again as it was left, so that a button stays disabled until then. */
export function leave(url) {
  window.location.assign(url);
  return new Promise((resolve) => window.addEventListener("pageshow", (event) => event.persisted && resolve()));
}

/** Pairs of a name and a value, text or nodes, in a list of definitions. One without a value is left out; one that is the same is not touched. */
export function drawFacts(list, facts) {
  const pairs = facts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", { dir: "auto" }, value)));
  arrange(list, pairs.map((pair, i) => (list.children[i]?.isEqualNode(pair) ? list.children[i] : pair)));
}

/**
 * Puts the buttons that turn the pages of a list into `box`; `turn` gets the button and 1 or -1. Returns what draws them: `before` and `after`
 * tell whether there is a page there. With one page alone there are no buttons. The keyboard does not stay on one that leads nowhere.
 */
export function pager(box, turn, between = []) {
  const [back, on] = [[t("← Previous"), -1], [t("Next →"), 1]].map(([word, step]) => {
    const node = el("button", { type: "button", class: "ghost", hidden: true }, word);
    node.addEventListener("click", () => turn(node, step));
    return node;
  });
  box.append(back, ...between, on);
  return (before, after) => {
    const focused = document.activeElement;
    [back.disabled, on.disabled] = [!before, !after];
    for (const node of [back, on]) show(node, before || after);
    if (focused === back && !before) on.focus();
    if (focused === on && !after) back.focus();
  };
}

/** A badge of a word and its colour. */
export function drawBadge(node, [word, kind]) {
  setText(node, word);
  node.className = `badge ${kind}`;
}

/** Segments in the given order; each is [class, share from 0 to 1]. */
export function drawBar(bar, segments, { percent, text }) {
  for (const [i, [kind, share]] of segments.entries()) {
    const fill = bar.children[i] ?? bar.appendChild(el("span", { class: `fill ${kind}` }));
    fill.style.width = `${Math.max(0, Math.min(100, share * 100))}%`;
  }
  if (percent === null) bar.removeAttribute("aria-valuenow");
  else bar.setAttribute("aria-valuenow", String(percent));
  bar.setAttribute("aria-valuetext", text);
  bar.classList.toggle("unknown", percent === null);
}

/**
 * A problem (RFC 9457; `lang` is the language of `detail`, `english` what the API says of it in English) with its bad rows as a table, put
 * into `box`; null takes it away. Of a text whose encoding is in doubt each likely one is a button, and so is each other sheet of a workbook refused for the one that was read; it calls
 * `onChoice` with the option's name and value.
 */
export function showProblem(box, problem, onChoice = null) {
  box.replaceChildren();
  show(box, problem !== null);
  if (problem === null) return;
  box.append(el("p", {}, el("strong", {}, user(problem.detail, { lang: problem.lang }))));
  if (problem.english) box.append(el("p", {}, english(problem.english)));
  const errors = (problem.errors || []).filter((e) => e.row !== null || e.column !== null);
  if (errors.length) box.append(errorTable(errors, problem.errors_total ?? errors.length));
  if (onChoice && problem.suggestions?.length) box.append(encodings(problem.suggestions, onChoice));
  if (onChoice && problem.sheets?.length) box.append(sheets(problem.sheets, onChoice));
  box.focus();
}

function encodings(suggestions, onChoice) {
  const each = suggestions.map(({ encoding, cells }) =>
    el("li", {}, choice("encoding", encoding, t("Read it as {encoding}", { encoding }), onChoice), " ", ...cells.flatMap((cell) => [user(cell, { class: "user value" }), " "])));
  return choices(t("Which of these reads right?"), each);
}

const sheets = (names, onChoice) =>
  choices(t("Which sheet has the rows?"), names.map((name) => el("li", {}, choice("sheet", name, parts("Read sheet {sheet}", { sheet: user(name) }), onChoice))));

const choices = (question, each) => el("div", {}, el("p", {}, question), el("ul", { class: "choices" }, each));

function choice(name, value, text, onChoice) {
  const button = el("button", { type: "button", class: "ghost" }, el("span", {}, text));
  button.addEventListener("click", () => onChoice(name, value));
  return button;
}

const SHOWN = 200;

/** What is at fault: a column of the sheet, or the setting of the Task that a field of a request is. */
const faulty = ({ row, column, code }) => (row === null && code !== "missing_columns" && Object.hasOwn(KNOBS, column ?? "") ? KNOBS[column] : user(column));

/** Bad rows as a table, with the cells that are at fault. */
export function errorTable(errors, total) {
  const rows = errors.slice(0, SHOWN).map((e) =>
    el("tr", {}, el("td", { class: "number" }, e.row ?? ""), el("td", {}, faulty(e)), el("td", {}, user(e.message)),
      el("td", { class: "fault" }, e.value === null || e.value === undefined ? "" : user(plain(e.value), { class: "user value" }))));
  const heads = [t("Row"), t("Column"), t("Reason"), t("Value")].map((h, i) => el("th", { scope: "col", class: i === 0 ? "number" : null }, h));
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("Refused rows") }, table);
  return total > rows.length ? el("div", {}, box, el("p", { class: "quiet" }, t("and {n} more", { n: total - rows.length }))) : box;
}

export const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** The cells of a row as name: value pairs, as short as a table needs them. */
export function cells(values) {
  if (values === null || typeof values !== "object" || Array.isArray(values)) return user(plain(values));
  const pairs = Object.entries(values).filter(([, v]) => v !== null && v !== "");
  return el("span", { class: "cells" }, pairs.slice(0, 12).map(([name, value]) =>
    el("span", { class: "cell" }, user(name, { class: "user name" }), " ", user(plain(value)))));
}
