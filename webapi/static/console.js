// What the pages of the operator share: links, lists that are read page by page, and buttons that do something to a row.

import { Poller, attempt } from "./api.js";
import { $, el, pager, setText, sure } from "./dom.js";
import { t } from "./i18n.js";

const root = document.body.dataset.page;

export const jobLink = (id) => el("a", { class: "id", href: `${root}jobs/${encodeURIComponent(id)}` }, el("bdi", {}, id));
export const taskLink = (id) => el("a", { class: "task-link", href: `${root}tasks/${id}` }, t("Task {task}", { task: id }));

/** What was done, a text or nodes, for everybody: it stays until the next thing is done. */
export const tell = (said) => $("#said").replaceChildren(...[said].flat());

/**
 * A button in a row; its name says to those who cannot see the row what it is about. `work` returns what to tell; `asked`: the arguments of
 * `sure`, which asks before.
 */
export function doing(word, about, work, asked = null) {
  const node = el("button", { type: "button", class: "ghost", "aria-label": `${word}: ${about}` }, word);
  node.addEventListener("click", async () => {
    if (asked !== null && !(await sure(...asked()))) return;
    let said = "";
    if (await attempt($("#problem"), node, async () => { said = await work(); })) tell(said);
  });
  return node;
}

/** Another word on a button of `doing`. */
export function name(button, word, about) {
  setText(button, word);
  button.setAttribute("aria-label", `${word}: ${about}`);
}

const PAGE = 25;

/**
 * A list of the API that counts the entries to skip (`after`), with the buttons that turn its pages in `box`. `draw` gets each page; one that
 * is empty, because its entries have gone, turns back.
 */
export class Pages {
  constructor(url, { has, every, box, draw }) {
    Object.assign(this, { url, has, starts: [0], next: null, draw });
    this.drawPager = pager(box, (button, step) => this.turn(step));
    this.poller = new Poller("", { every, has, onData: (data) => this.take(data) });
    this.open();
  }

  turn(step) {
    if (step > 0 && this.next === null) return; // the page before is still on its way
    if (step > 0) this.starts.push(this.next);
    else if (this.starts.length > 1) this.starts.pop();
    this.open();
  }

  open() {
    this.next = null;
    this.poller.url = `${this.url}?limit=${PAGE}&after=${this.starts.at(-1)}`;
    this.poller.now();
  }

  now() {
    this.poller.now();
  }

  take(data) {
    if (data[this.has].length === 0 && this.starts.length > 1) {
      this.starts.pop();
      this.open();
      return;
    }
    this.next = data.links.next === null ? null : Number(new URL(data.links.next, location.href).searchParams.get("after"));
    this.drawPager(this.starts.length > 1, this.next !== null);
    this.draw(data);
  }
}
