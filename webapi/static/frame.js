// What every page has: times that stay fresh, the theme, tables that become cards on a narrow page, and the keyboard.

import "./focus.js";
import { $, $$, freshen } from "./dom.js";
import { t } from "./i18n.js";
import { zone } from "./words.js";

// -- The navigation: on a narrow page the current entry may be beside what is shown of it ----------------------------------

const nav = $(".top nav");
const current = nav && $("[aria-current]", nav);
if (current) nav.scrollLeft = current.offsetLeft - nav.offsetLeft - (nav.clientWidth - current.offsetWidth) / 2;

// -- Times -------------------------------------------------------------------------------------------------------------

const FRESH_MS = 10_000;

const freshenAll = () => $$("time[datetime]").forEach(freshen);

$("#zone").textContent = t("Times are those of {zone}.", { zone: zone() });
freshenAll();
setInterval(freshenAll, FRESH_MS);
document.addEventListener("visibilitychange", () => !document.hidden && freshenAll());

// -- The theme: a cookie, so that the server writes it into the page and nothing flashes ---------------------------------

const theme = $("#theme");
theme.disabled = false;
theme.addEventListener("change", () => {
  const { value } = theme;
  document.cookie = `asynctask_theme=${value}; Path=${document.body.dataset.page}; Max-Age=${value ? 31536000 : 0}; SameSite=Lax`;
  document.documentElement.dataset.theme = value;
  $('meta[name="color-scheme"]').content = value || "light dark";
});

// -- Tables ------------------------------------------------------------------------------------------------------------

const ROLES = { TABLE: "table", THEAD: "rowgroup", TBODY: "rowgroup", TR: "row", TH: "columnheader", TD: "cell" };

/** Names the column in each cell, for the cards of a narrow page, which are no tables to a reader of screens without roles. */
function label(row) {
  const table = row.closest("table");
  const heads = $$("thead tr:last-child > *", table);
  for (const node of [table, ...table.children, row, ...heads, ...row.children]) {
    if (!node.hasAttribute("role") && node.tagName in ROLES) node.setAttribute("role", ROLES[node.tagName]);
  }
  if (row.parentElement.tagName !== "TBODY") return;
  for (const [i, cell] of [...row.children].entries()) {
    const name = heads[i]?.textContent.trim();
    if (name && cell.colSpan === 1) cell.dataset.label = name;
  }
}

function labelAll(root) {
  if (root.nodeType !== Node.ELEMENT_NODE) return;
  if (root.matches("tr")) label(root);
  for (const row of $$("tr", root)) label(row);
}

labelAll(document.body);
new MutationObserver((changes) => changes.forEach(({ addedNodes }) => addedNodes.forEach(labelAll)))
  .observe(document.body, { childList: true, subtree: true });

// -- The keyboard: single keys, never while somebody types ---------------------------------------------------------------

const OFF = "asynctask.shortcuts-off";
const AFTER_G_MS = 1_500;
const help = $("#shortcuts");
const on = $("#shortcuts-on");

/** A browser may forbid storage; then a choice lasts as long as the page. */
function stored(value) {
  try {
    if (value === undefined) return localStorage.getItem(OFF);
    return value ? localStorage.setItem(OFF, value) : localStorage.removeItem(OFF);
  } catch {
    return null;
  }
}

on.checked = stored() === null;
on.addEventListener("change", () => stored(on.checked ? "" : "off"));
const opener = $("#shortcuts-open");
opener.hidden = false;
opener.addEventListener("click", ask);

let wentAt = -Infinity;

function go(key) {
  wentAt = -Infinity;
  const link = $(`nav [data-key="${CSS.escape(key)}"]`);
  if (link) window.location.assign(link.href);
  return Boolean(link);
}

/** To the row after or before the one that has the focus: to its first link or button. */
function step(by) {
  const rows = $$("main tbody tr").filter((row) => row.checkVisibility() && $("a[href], button", row));
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  const next = rows[at < 0 ? 0 : at + by];
  if (next) $("a[href], button", next).focus();
  return next !== undefined;
}

function find() {
  const field = $$('[role="search"] input').find((input) => input.checkVisibility());
  field?.focus();
  return field !== undefined;
}

function ask() {
  help.showModal();
  return true;
}

const KEYS = { "/": find, "?": ask, j: () => step(1), k: () => step(-1) };

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (!on.checked || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (target.closest("input, textarea, select, [contenteditable]") || $("dialog[open]")) return;
  if (event.timeStamp - wentAt < AFTER_G_MS) {
    if (go(key)) event.preventDefault();
  } else if (key === "g") wentAt = event.timeStamp;
  else if (Object.hasOwn(KEYS, key) && KEYS[key]()) event.preventDefault();
});
