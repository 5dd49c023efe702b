// Keeps the keyboard where it was: what has it may be hidden or go away, by an action or with an answer of the server.

import { $, $$ } from "./dom.js";

const CAN = 'button, a[href], input, select, textarea, summary, [tabindex="0"]';
/** What a neighbour may be outside of. */
const SMALL = "td, tr, li, span";
/** What is around: its region, or its part with a heading. */
const WHOLE = '[tabindex="0"], section, dialog, main, body';

const usable = (node) => node.checkVisibility() && !node.disabled;
const within = (node) => (!node ? [] : [...(node.matches(CAN) ? [node] : []), ...$$("button", node), ...$$(CAN, node)].filter(usable));

/** The first control on the way from the elements `before` and `after` a place to the ends of what they are in. */
function beside(before, after) {
  for (let [back, on] = [before, after]; back || on; [back, on] = [back?.previousElementSibling, on?.nextElementSibling]) {
    const [found] = [...within(on), ...within(back)];
    if (found) return found;
  }
  return null;
}

/** What is nearest to a place in `parent`, that between the elements `before` and `after`: a control, or what is around it. */
function nearest(parent, before, after) {
  const found = beside(before, after);
  if (found) return found;
  if (parent.matches(SMALL)) return nearest(parent.parentElement, parent.previousElementSibling, parent.nextElementSibling);
  const box = parent.closest(WHOLE);
  if (!box.matches(CAN)) return heading(box);
  return usable(box) ? box : nearest(box.parentElement, null, null);
}

function heading(box) {
  const found = [...$$("h1, h2", box), ...$$("h1")].find(usable) ?? $("#main");
  if (!found.hasAttribute("tabindex")) found.tabIndex = -1;
  return found;
}

const element = (node, way) => (node === null || node instanceof Element ? node : node[way]);

/** Where `node` was, of the `changes` that took it away. */
function place(node, changes) {
  const change = changes.findLast(({ target, removedNodes }) => target.isConnected && [...removedNodes].some((each) => each.contains(node)));
  if (change === undefined) return [document.body, null, null];
  const { target, previousSibling: before, nextSibling: after } = change;
  const [previous, next] = [element(before, "previousElementSibling"), element(after, "nextElementSibling")];
  // A neighbour may have gone with it, or stand elsewhere now.
  return [target, ...[previous, next].map((each) => (each?.parentElement === target ? each : null))];
}

let last = null;

function keep(changes) {
  const { activeElement: now } = document;
  if (last === null || (now !== document.body && now !== last)) return;
  if (last.isConnected && last.checkVisibility()) return;
  const found = last.isConnected ? [last.parentElement, last.previousElementSibling, last.nextElementSibling] : place(last, changes);
  nearest(...found).focus();
}

document.addEventListener("focusin", ({ target }) => { last = target; });
// Whoever points elsewhere has left it.
document.addEventListener("pointerdown", ({ target }) => { if (!last?.contains(target)) last = null; }, true);
new MutationObserver(keep).observe(document.body, { subtree: true, childList: true, attributes: true, attributeFilter: ["hidden", "open"] });
