// Talking to the server, beyond what asynctask.js does for every frontend: a request without a result is a Refused that says why
// in words, and polling goes on for as long as the page is open.

import { AsyncTaskError, backoff, follow, post, request, sleep, submit } from "./client/asynctask.js";
import { show, setText, showProblem } from "./dom.js";
import { language, ofCode } from "./i18n.js";
import { advice, cause, say, together } from "./words.js";

const CHANGE_MS = 60_000;
const WHEN_DONE = 15_000;

/**
 * An AsyncTaskError in the reader's words: `cause` says what happened; `problem` is the API's problem+json, if it wrote the answer,
 * with a `detail` that also says what to do, and `english`, the API's words where those are not the reader's. `effect`: "change" or
 * "list" if that may have been done all the same, or "none".
 */
export class Refused extends Error {
  constructor(error, effect) {
    const { status, problem, retryMs, unknown } = error;
    const said = problem?.detail && status !== 401 ? ofCode(problem.code) : undefined;
    const because = cause(status, said ?? problem?.detail);
    const detail = together(because, ...advice(status, problem?.detail, unknown ? effect : "none", retryMs > 0 ? retryMs / 1000 : null));
    super(detail);
    const shown = { ...problem, detail, lang: language, english: said && problem.detail };
    Object.assign(this, { name: "Refused", status, retryMs, unknown, cause: because, problem: shown });
  }

  /** Whether the API itself said that there is no such thing; a proxy also says 404 while it has no server. */
  get gone() {
    return (this.status === 404 || this.status === 410) && this.problem.code !== undefined;
  }
}

/** What `work` resolves to; throws Refused for an AsyncTaskError. */
async function inWords(effect, work) {
  try {
    return await work;
  } catch (error) {
    throw error instanceof AsyncTaskError ? new Refused(error, effect) : error;
  }
}

const LINK = new URLSearchParams(location.search).get("link");

/** A URL of this server with the signed link that the page was opened with, if it was: the server knows its reader by that. */
export const linked = (url) => (LINK === null ? url : `${url}${url.includes("?") ? "&" : "?"}link=${encodeURIComponent(LINK)}`);

/** The server of the `url` of Tasks, as asynctask.js takes it. */
const server = (url) => new URL("..", new URL(url, location.href));

/** JSON from `url`, an object with the member `has`; throws Refused for all else. */
export async function call(url, { method = "GET", body, has }) {
  const json = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const change = method === "GET" ? {} : { method, ms: CHANGE_MS };
  const { data } = await inWords(method === "GET" ? "none" : "change", request(linked(url), { ...change, ...json, has: [has] }));
  return data;
}

/** Whether a link would be served: throws Refused if not. A browser says nothing of a download that is refused. */
export const check = (url) => inWords("none", request(linked(url), { method: "HEAD" }));

/**
 * Sends a list, a FormData with its file, to the `url` of Tasks; `onSent` gets the share that has gone, 0 to 1. Throws Refused, and
 * the reason of `signal` when that ends it. `effect`: "none" if the list is only checked.
 */
export const upload = (url, fields, onSent, { signal = null, effect = "list" } = {}) =>
  inWords(effect, submit(fields, { url: server(url), onProgress: onSent, signal }));

/** What the server says of a list that it only looks at, an object with the member `has`; all else as of `upload`. */
export async function look(url, fields, onSent, { signal, has }) {
  try {
    return await inWords("none", post(linked(url), { Accept: "application/json" }, fields, onSent, signal, [has]));
  } catch (error) {
    signal.throwIfAborted();
    throw error;
  }
}

/** The file that is the answer to a form; all else as of `upload`. */
export async function download(url, fields, signal) {
  let answer;
  try {
    answer = await fetch(linked(url), { method: "POST", body: fields, signal });
    if (answer.ok) return await answer.blob();
  } catch {
    signal.throwIfAborted();
    throw new Refused(new AsyncTaskError(0), "none");
  }
  const data = await answer.json().catch(() => null);
  throw new Refused(new AsyncTaskError(answer.status, data, answer.headers.get("Retry-After")), "none");
}

// -- What people do ----------------------------------------------------------------------------------------------------

/**
 * Does what a click asks for, with its `button` disabled meanwhile, and shows in `box` why it is refused (`onChoice` as of
 * `showProblem`). Returns whether it was done.
 */
export async function attempt(box, button, work, onChoice = null) {
  const focused = document.activeElement === button;
  showProblem(box, null);
  button.disabled = true;
  try {
    await work();
    return true;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    showProblem(box, error.problem, onChoice);
    return false;
  } finally {
    button.disabled = false;
    // A disabled button loses the keyboard. One that is hidden by now has given it to another: focus.js.
    if (focused && document.activeElement === document.body) button.focus();
  }
}

// -- Polling -----------------------------------------------------------------------------------------------------------

/**
 * Asks `url` again and again for an object with the member `has`: with the ETag of the last answer, as soon as the answer says
 * (`poll_after_ms`, else `every`), slowly when it is done or the page is hidden, with growing pauses while there is no answer.
 * `onData` may load more; until that is there too, the answer counts as none. `onGone`: the API has no such thing any more.
 */
export class Poller {
  constructor(url, { every = 3000, has, onData, onGone = null }) {
    Object.assign(this, { url, every, has, onData, onGone, etag: null, last: null, pause: every, failures: 0, trouble: null, timer: null, busy: false, again: false });
    document.addEventListener("visibilitychange", () => !document.hidden && this.now());
    window.addEventListener("online", () => this.now());
    window.addEventListener("pageshow", (event) => event.persisted && this.now());
  }

  start() {
    this.now();
    return this;
  }

  /** Asks at once. An answer that is under way is from before, and is not shown. */
  now() {
    clearTimeout(this.timer);
    if (this.busy) this.again = true;
    else this.ask();
  }

  /** The same, and takes the answer even if it is the last one again: the page shows more of it now. */
  anew() {
    this.etag = null;
    this.now();
  }

  async ask() {
    this.busy = true;
    this.trouble = null;
    try {
      await this.round();
    } catch (error) {
      if (error instanceof Refused) this.trouble = error;
      else if (error.name !== "AbortError") reportError(error); // a bug of the page must not end its polling
    }
    this.busy = false;
    const gone = this.trouble?.gone && this.onGone !== null;
    this.failures = this.trouble === null || gone ? 0 : this.failures + 1;
    note(this, gone ? null : this.trouble);
    if (this.again) {
      this.again = false;
      this.now();
    } else if (gone) this.onGone();
    else this.timer = setTimeout(() => this.ask(), this.wait());
  }

  /** Asks once. */
  async round() {
    const { data, headers } = await inWords("none", request(linked(this.url), { has: [this.has], etag: this.etag }));
    if (data !== null && !this.again) await this.take(data, headers.get("ETag"));
  }

  async take(data, etag) {
    Object.assign(this, { etag: null, last: data });
    this.pause = data.done ? WHEN_DONE : (data.poll_after_ms ?? this.every);
    await this.onData(data);
    if (!this.again) this.etag = etag;
  }

  wait() {
    if (this.trouble === null) return Math.max(250, document.hidden ? this.pause * 5 : this.pause);
    return backoff(this.trouble, this.failures);
  }
}

/**
 * A Poller of one of the Tasks at `url`: while the page is seen and the Task is not done, `follow` brings each change to `onChange`,
 * and nothing is polled. `onData` gets the last of them no sooner than a poll would bring it: what it loads costs more than a Task.
 */
export class Follower extends Poller {
  constructor(url, id, { onChange, ...options }) {
    super(`${url}/${id}`, { has: "counts", ...options });
    Object.assign(this, { id, server: server(url), onChange, following: null, resting: null, taken: null });
    document.addEventListener("visibilitychange", () => document.hidden && this.following?.abort());
  }

  now() {
    this.following?.abort();
    super.now();
  }

  anew() {
    if (this.following === null) return super.anew();
    this.etag = this.taken = null;
    this.resting.abort();
  }

  async round() {
    await super.round();
    if (!this.again && !document.hidden && !this.last.done) await inWords("none", this.follow());
  }

  /** Until the Task is done, or `following` is aborted: what goes wrong aborts it, too. */
  async follow() {
    const ends = (this.following = new AbortController());
    const onChange = (p) => ends.signal.aborted || this.onChange((this.last = p));
    const onTrouble = (error) => ends.abort(error);
    follow(this.id, { url: this.server, token: LINK, onChange, onTrouble, signal: ends.signal }).catch(onTrouble);
    this.taken = this.last;
    this.failures = 0;
    note(this, null);
    try {
      for (;;) {
        this.resting = new AbortController();
        if (this.taken !== this.last) await this.take((this.taken = this.last), null);
        if (this.taken?.done) return;
        await sleep(this.pause, AbortSignal.any([ends.signal, this.resting.signal])).catch(() => ends.signal.throwIfAborted());
      }
    } finally {
      ends.abort();
      this.following = null;
    }
  }
}

const troubles = new Map();

function note(poller, trouble) {
  if (trouble === null) troubles.delete(poller);
  else troubles.set(poller, trouble.status === 0 ? say("connection_lost") : together(trouble.cause, say("asks_again")));
  const box = document.getElementById("connection");
  show(box, troubles.size > 0);
  box.lang = language;
  if (troubles.size > 0) setText(box, [...troubles.values()][0]);
}
