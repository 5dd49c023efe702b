// Talking to the server: one way for every request, whose end without a result is a Refused that says why in words; lists
// that are taken once however often they are sent; and polling that survives a server that is away.

import { show, setText, showProblem } from "./dom.js";
import { advice, cause, say, together, tongue } from "./words.js";

const READ_MS = 20_000;
const CHANGE_MS = 60_000;
const LONGEST_WAIT = 15_000;
const LONGEST_RETRY_AFTER = 60_000;
const WHEN_DONE = 15_000;

/**
 * A request without its result. `status` is 0 if no answer came; `cause` says what happened; `problem` is the API's problem+json,
 * if it wrote the answer, with a `detail` that also says what to do; `unknown` says whether a change may have been made all the
 * same; `retryMs` is that of Retry-After.
 */
export class Refused extends Error {
  constructor({ status = 0, data = null, retryAfter = null, effect }) {
    // A proxy answers in formats of its own: only the API's problems are quoted.
    const problem = String(data?.type ?? "").startsWith("urn:asynctask:problem:") ? data : null;
    const seconds = /^\d{1,6}$/.test(retryAfter ?? "") ? Number(retryAfter) : null;
    const unknown = effect !== "none" && (status < 400 || status >= 500);
    const because = cause(status, problem?.detail);
    const detail = together(because, ...advice(status, problem?.detail, unknown ? effect : "none", seconds));
    super(detail);
    this.name = "Refused";
    Object.assign(this, { status, unknown, cause: because, retryMs: (seconds ?? 0) * 1000 });
    this.problem = { ...problem, detail, lang: tongue() };
  }

  /** Whether the API itself said that there is no such thing; a proxy also says 404 while it has no server. */
  get gone() {
    return (this.status === 404 || this.status === 410) && this.problem.code !== undefined;
  }
}

/** JSON from `url`, an object with the member `has`; throws Refused for all else. */
export const call = async (url, options) => (await request(url, options)).data;

/** Whether a link would be served: throws Refused if not. A browser says nothing of a download that is refused. */
export const check = (url) => request(url, { method: "HEAD" });

const LINK = new URLSearchParams(location.search).get("link");

/** A URL of this server with the signed link that the page was opened with, if it was: the server knows its reader by that. */
export const linked = (url) => (LINK === null ? url : `${url}${url.includes("?") ? "&" : "?"}link=${encodeURIComponent(LINK)}`);

/** An answer with its ETag; `data` is null if it is the one that `etag` stands for. */
async function request(url, { method = "GET", body, has, etag = null }) {
  const headers = { Accept: "application/json" };
  if (etag !== null) headers["If-None-Match"] = etag;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const effect = method === "GET" || method === "HEAD" ? "none" : "change";
  let response;
  let text;
  try {
    const signal = AbortSignal.timeout(effect === "none" ? READ_MS : CHANGE_MS);
    response = await fetch(linked(url), { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
    text = await response.text();
  } catch {
    throw new Refused({ effect });
  }
  if ((response.status === 304 && etag !== null) || (response.ok && method === "HEAD")) return { data: null, etag };
  return { data: taken(response.status, text, response.headers.get("Retry-After"), has, effect), etag: response.headers.get("ETag") };
}

function taken(status, text, retryAfter, has, effect) {
  const data = parsed(text);
  if (status >= 200 && status < 300 && data !== null && has in data) return data;
  throw new Refused({ status, data, retryAfter, effect });
}

/** An object of JSON, or null. */
function parsed(text) {
  try {
    const data = JSON.parse(text);
    return typeof data === "object" ? data : null;
  } catch {
    return null;
  }
}

// -- Lists -------------------------------------------------------------------------------------------------------------

/**
 * Sends a list, a FormData with its file; `onSent` gets the share that has gone, 0 to 1. Throws Refused, and the reason of `signal`
 * when that ends it. A list whose answer was lost keeps its Idempotency-Key: sent again, with the same file and fields, it becomes
 * no second Task. With the effect "none" it is only looked at; the answer has the member `has`.
 */
export function upload(url, fields, onSent, { signal = null, has = "links", effect = "list" } = {}) {
  const list = JSON.stringify([...fields].map(([name, value]) =>
    (value instanceof File ? [name, value.name, value.size, value.lastModified] : [name, value])));
  // XMLHttpRequest, because fetch does not say how much of a body has gone.
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", url);
    request.setRequestHeader("Accept", "application/json");
    if (effect === "list") request.setRequestHeader("Idempotency-Key", keyOf(list));
    request.upload.addEventListener("progress", (e) => e.lengthComputable && onSent(e.loaded / e.total));
    signal?.addEventListener("abort", () => { reject(signal.reason); request.abort(); });
    for (const kind of ["error", "abort"]) request.addEventListener(kind, () => reject(new Refused({ effect })));
    request.addEventListener("load", () => {
      try {
        const answer = taken(request.status, request.responseText, request.getResponseHeader("Retry-After"), has, effect);
        forget(list);
        resolve(answer);
      } catch (error) {
        if (!error.unknown) forget(list);
        reject(error);
      }
    });
    request.send(fields);
  });
}

/** The file that is the answer to a form. Throws Refused, and the reason of `signal` when that ends it. */
export async function download(url, fields, signal) {
  let response;
  try {
    response = await fetch(linked(url), { method: "POST", body: fields, signal });
    if (response.ok) return await response.blob();
  } catch (error) {
    if (signal.aborted) throw signal.reason;
    throw new Refused({ effect: "none" });
  }
  return taken(response.status, await response.text(), response.headers.get("Retry-After"), "", "none");
}

const KEYS = "asynctask.keys";
const MOST_KEYS = 20;

/** The keys of lists whose answers are outstanding, by list: kept by the tab, so that a reload or a way back finds them. */
let keys = new Map();
try {
  keys = new Map(JSON.parse(sessionStorage.getItem(KEYS) ?? "[]"));
} catch {
  // A browser may forbid storage; then they last as long as the page.
}

function keyOf(list) {
  // randomUUID is missing where the page comes without TLS.
  const random = [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const key = keys.get(list) ?? random;
  keep([...[...keys].filter(([other]) => other !== list), [list, key]].slice(-MOST_KEYS));
  return key;
}

const forget = (list) => keep([...keys].filter(([other]) => other !== list));

function keep(entries) {
  keys = new Map(entries);
  try {
    sessionStorage.setItem(KEYS, JSON.stringify(entries));
  } catch {
    // As above.
  }
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
    // A disabled button loses the keyboard.
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
    Object.assign(this, { url, every, has, onData, onGone, etag: null, pause: every, failures: 0, trouble: null, timer: null, busy: false, again: false });
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

  async ask() {
    this.busy = true;
    this.trouble = null;
    try {
      const answer = await request(this.url, { has: this.has, etag: this.etag });
      if (answer.data !== null && !this.again) await this.take(answer);
    } catch (error) {
      if (error instanceof Refused) this.trouble = error;
      else reportError(error); // a bug of the page must not end its polling
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

  async take({ data, etag }) {
    this.etag = null;
    this.pause = data.done ? WHEN_DONE : (data.poll_after_ms ?? this.every);
    await this.onData(data);
    this.etag = etag;
  }

  wait() {
    if (this.trouble === null) return Math.max(250, document.hidden ? this.pause * 5 : this.pause);
    const { status, retryMs } = this.trouble;
    // What a person has to mend does not pass by itself soon.
    const growing = status >= 400 && status < 500 ? LONGEST_WAIT : Math.min(LONGEST_WAIT, 500 * 2 ** Math.min(this.failures, 6));
    // Spread a little, so that the pages of many people do not all return at the same moment.
    return Math.max(growing * (0.75 + Math.random() / 2), Math.min(retryMs, LONGEST_RETRY_AFTER));
  }
}

const troubles = new Map();

function note(poller, trouble) {
  if (trouble === null) troubles.delete(poller);
  else troubles.set(poller, trouble.status === 0 ? say("connection_lost") : together(trouble.cause, say("asks_again")));
  const box = document.getElementById("connection");
  show(box, troubles.size > 0);
  box.lang = tongue();
  if (troubles.size > 0) setText(box, [...troubles.values()][0]);
}
