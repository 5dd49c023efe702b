// The recent Tasks.

import { Poller, attempt, call } from "./api.js";
import { $, drawBadge, drawBar, el, setText, show, user } from "./dom.js";
import { amount, badge, pace, percent, reached, segments, sentence, when } from "./words.js";

const api = document.body.dataset.api;
const PAGE = 10;

const list = $("#tasks");
const shown = new Map();
let older = null;

function entry(p) {
  const bar = el("div", { class: "bar thin", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": p.title || `Task ${p.task_id}` });
  const node = el("li", {},
    el("a", { class: "task", href: p.links.ui },
      el("span", { class: "task-head" }, user(p.title || `Task ${p.task_id}`, { class: "user task-title" }), el("span", { class: "badge" })),
      bar,
      el("span", { class: "task-foot" }, el("span", { class: "said" }), el("span", { class: "quiet meta" }))));
  node.dataset.id = p.task_id;
  return node;
}

function fill(node, p) {
  setText($(".task-title", node), p.title || `Task ${p.task_id}`);
  drawBadge($(".badge", node), badge(p));
  drawBar($(".bar", node), segments(p), { percent: reached(p), text: `${percent(p)}, ${sentence(p)}` });
  setText($(".said", node), amount(p) + sentence(p));
  setText($(".meta", node), [p.worker, pace(p), when(p.created_at)].filter(Boolean).join(" · "));
}

function draw(tasks) {
  list.setAttribute("aria-busy", "false");
  for (const p of tasks) {
    if (!shown.has(p.task_id)) place(p);
    fill(shown.get(p.task_id), p);
  }
  show($("#no-tasks"), shown.size === 0);
}

function place(p) {
  const node = entry(p);
  const before = [...list.children].find((other) => Number(other.dataset.id) < p.task_id);
  list.insertBefore(node, before ?? null);
  shown.set(p.task_id, node);
}

const showOlder = () => show($("#older"), Boolean(older));

new Poller(`${api}?limit=${PAGE}`, {
  every: 2000,
  has: "tasks",
  onData(page) {
    draw(page.tasks);
    if (older === null) older = page.links.next ?? "";
    showOlder();
  },
}).start();

$("#older").addEventListener("click", () => attempt($("#older-problem"), $("#older"), async () => {
  const page = await call(older, { has: "tasks" });
  draw(page.tasks);
  older = page.links.next ?? "";
  showOlder();
}));
