// AsyncTask for frontends: submit a list, follow its Task, and two elements. asynctask.d.ts says how each behaves.

const HOME = new URL("../..", import.meta.url).href; // the server of /client/VERSION/asynctask.js
const LINK = /^\d+\.rc?\.\d+\.[\w-]{43}$/;
const PAGE = globalThis.document; // not where a server renders

export class AsyncTaskError extends Error {
  name = "AsyncTaskError";
  constructor(status, data, retryAfter) {
    // A proxy answers in formats of its own: only the API's problems are quoted.
    const problem = `${data?.type}`.startsWith("urn:asynctask:problem:") ? data : null;
    super(problem?.detail ?? (status ? `This is no answer of AsyncTask (status ${status}).` : "No answer came from the server."));
    Object.assign(this, { status, problem, code: problem?.code ?? null, retryMs: retryAfter > 0 ? retryAfter * 1000 : 0 });
    this.unknown = status < 400 || status > 499;
    this.final = problem !== null && !this.unknown && status !== 408 && status !== 429;
  }
}

/** Milliseconds to wait after so many failures; spread, so that the pages of many people do not return at one moment. */
export function backoff({ unknown, retryMs }, failures) {
  // What a person has to mend does not pass by itself soon; but the first failure may be of one way to ask.
  const ms = unknown || failures < 2 ? Math.min(15_000, 500 * 2 ** failures) : 15_000;
  return Math.max(ms * (0.75 + Math.random() / 2), Math.min(retryMs, 60_000));
}

// -- Requests

const absolute = (url) => new URL(url, globalThis.location?.href);
const api = (url, path) => new URL(`api/tasks${path}`, absolute(`${url}`.replace(/\/?$/, "/")));

/** The URL and the headers of whoever has this token: that of a link is in the query. */
function signed(url, token, headers) {
  const to = absolute(url);
  if (!LINK.test(token)) return [to, token ? { ...headers, Authorization: `Bearer ${token}` } : headers];
  to.searchParams.set("link", token);
  return [to, headers];
}

/** The data of an answer of the API, which has one of these members. */
function taken(status, text, retryAfter, has) {
  let data = null;
  try {
    data = JSON.parse(text);
  } catch {
    // it is not the API's
  }
  if (status >= 200 && status < 300 && has.some((name) => Object.hasOwn(data ?? {}, name))) return data;
  throw new AsyncTaskError(status, data, retryAfter);
}

/** The same, of one that fetch brought. */
const fetched = async (answer, has) => taken(answer.status, await answer.text(), answer.headers.get("Retry-After"), has);

/** `read(answer, alive)`, given up `ms` after the beginning, or after the last call of `alive`. */
async function ask(url, { token, headers, signal, ms, ...init }, read) {
  const silent = new AbortController();
  const ends = AbortSignal.any([silent.signal, signal ?? silent.signal]);
  const [to, sent] = signed(url, token, headers);
  let timer;
  const alive = (longer) => {
    clearTimeout(timer);
    timer = setTimeout(() => silent.abort(), longer);
  };
  alive(ms);
  try {
    return await read(await fetch(to, { credentials: "include", ...init, headers: sent, signal: ends }), alive);
  } catch (error) {
    signal?.throwIfAborted();
    throw error instanceof AsyncTaskError ? error : new AsyncTaskError(0);
  } finally {
    clearTimeout(timer);
    silent.abort();
  }
}

/** An answer of the API: its data, null if it is the one of `etag` or of HEAD, and its headers. */
export function request(url, { has, etag, headers, ms = 20_000, ...init }) {
  const sent = { Accept: "application/json", ...(etag && { "If-None-Match": etag }), ...headers };
  return ask(url, { ms, headers: sent, ...init }, async (answer) => {
    const none = (etag && answer.status === 304) || (answer.ok && init.method === "HEAD");
    return { headers: answer.headers, data: none ? null : await fetched(answer, has) };
  });
}

// -- Lists

const forgetful = {};

/** The keys of lists whose answers are outstanding: the tab keeps them, so that a reload finds them, if the browser permits. */
function keys() {
  try {
    return sessionStorage;
  } catch {
    return forgetful;
  }
}

function nameOf(list) {
  let hash = 1;
  for (let i = 0; i < list.length; i += 1) hash = Math.imul(hash ^ list.charCodeAt(i), 0x01000193);
  return `asynctask.${list.length}.${hash}`;
}

function formOf(list, options) {
  const form = new FormData();
  for (const [name, value] of list instanceof FormData ? list : [["file", list]]) form.append(name, value);
  for (const [name, value] of Object.entries(options)) {
    if (value !== null && value !== undefined) form.set(name, typeof value === "object" ? JSON.stringify(value) : value);
  }
  return form;
}

const told = (form) => JSON.stringify([...form].map(([n, v]) => (v.name ? [n, v.name, v.size, v.lastModified] : [n, v])));

/** XMLHttpRequest, because fetch does not say how much of a body has gone. */
export async function post(url, headers, body, onProgress, signal, has = ["links", "dry_run"]) {
  const sending = new XMLHttpRequest();
  sending.open("POST", url);
  sending.withCredentials = true;
  for (const name in headers) sending.setRequestHeader(name, headers[name]);
  sending.upload.onprogress = (event) => event.lengthComputable && onProgress?.(event.loaded / event.total);
  signal?.addEventListener("abort", () => sending.abort());
  await new Promise((resolve) => {
    sending.onloadend = resolve;
    sending.send(body);
  });
  return taken(sending.status, sending.responseText, sending.getResponseHeader("Retry-After"), has);
}

export async function submit(list, { url = HOME, worker, token, fields, idempotencyKey, onProgress, signal } = {}) {
  signal?.throwIfAborted();
  const [options, isItems] = [{ ...fields, ...(worker && { worker }) }, Array.isArray(list)];
  const body = isItems ? JSON.stringify({ ...options, items: list }) : formOf(list, options);
  const name = nameOf(url + (isItems ? body : told(body)));
  // randomUUID is missing where the page comes without TLS.
  const key = idempotencyKey ?? (keys()[name] ??= crypto.getRandomValues(new Uint32Array(4)).join("-"));
  const headers = { Accept: "application/json", "Idempotency-Key": key, ...(isItems && { "Content-Type": "application/json" }) };
  try {
    const task = await post(...signed(api(url, ""), token, headers), body, onProgress, signal);
    delete keys()[name];
    return task;
  } catch (error) {
    if (!error.unknown) delete keys()[name];
    signal?.throwIfAborted();
    throw error;
  }
}

// -- Following

let free = 3; // requests that may be held at a time: over HTTP/1.1 a browser has six connections to a server
let [streams, patience] = [0, 30_000]; // when a stream is tried again, and how long after the next that does not get through

/** Waits, and longer while the page is hidden. */
export function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    let due = false;
    const look = () => {
      if (!signal?.aborted && (!due || PAGE?.hidden)) return;
      clearTimeout(timer);
      PAGE?.removeEventListener("visibilitychange", look);
      signal?.removeEventListener("abort", look);
      if (signal?.aborted) reject(signal.reason);
      else resolve();
    };
    const timer = setTimeout(() => {
      due = true;
      look();
    }, ms);
    PAGE?.addEventListener("visibilitychange", look);
    signal?.addEventListener("abort", look);
    look();
  });
}

/** Takes the events of a stream until it ends. It begins at once, and a comment every 15 s says that it is there. `onPart` hears of each. */
function stream(task, tag, { token, signal }, take, onPart) {
  const headers = { Accept: "text/event-stream", ...(tag && { "Last-Event-ID": tag }) };
  return ask(`${task}/stream`, { token, signal, headers, ms: 5_000 }, async (answer, alive) => {
    if (!answer.headers.get("Content-Type")?.startsWith("text/event-stream")) await fetched(answer, []);
    let rest = "";
    for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive(40_000);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [, id, data] = /^id: (.*)\ndata: (.*)$/.exec(event) ?? [];
        if (data && take(JSON.parse(data), id)) return;
      }
      onPart();
    }
  });
}

const [STREAM, LONG_POLL, POLL] = [0, 1, 2];

export async function follow(id, { url = HOME, token, onChange, onTrouble, signal } = {}) {
  const task = api(url, `/${encodeURIComponent(id)}`);
  let [last, tag] = [null, null];
  let [way, wait, failures] = [LONG_POLL, 0, 0];
  const take = (progress, now) => {
    if (way === STREAM) patience = 30_000; // it gets through
    if (now !== tag) queueMicrotask(() => onChange?.(progress)); // what it throws does not end this
    [last, tag] = [progress, now];
    return last.done;
  };

  const answered = () => {
    if (!last) return; // only the beginning of a stream
    if (failures > 1) queueMicrotask(() => onTrouble?.(null)); // after onChange
    failures = 0;
  };

  /** Asks once. Returns the milliseconds to wait before the next time. */
  const once = async (how, init) => {
    if (how === STREAM) {
      await stream(task, tag, init, take, answered);
      return 2_000;
    }
    const [before, began, query] = [tag, Date.now(), how < POLL && tag ? "?wait=20" : ""];
    const { data, headers } = await request(`${task}${query}`, { ...init, ms: 40_000, has: ["counts"], etag: tag && `W/"${tag}"` });
    if (data) take(data, /"(.*)"/.exec(headers.get("ETag"))?.[1] ?? `${data.generation}.${data.version}`);
    const held = query && headers.get("Asynctask-Held") !== "no" && (tag !== before || Date.now() - began > 1_000);
    return held ? 500 : Math.max(250, last.poll_after_ms);
  };

  for (;;) {
    await sleep(wait, signal);
    const round = new AbortController(); // a page that nobody sees holds no request
    const hide = () => PAGE.hidden && round.abort();
    PAGE?.addEventListener("visibilitychange", hide);
    if (Date.now() >= streams) way = STREAM;
    const now = free > 0 ? way : POLL;
    if (now < POLL) free -= 1;
    try {
      wait = await once(now, { token, signal: AbortSignal.any([round.signal, signal ?? round.signal]) });
      answered();
      if (last?.done) return last;
    } catch (error) {
      signal?.throwIfAborted();
      if (round.signal.aborted) wait = 0;
      else if (!(error instanceof AsyncTaskError) || error.final) throw error;
      else {
        if (now === STREAM && Date.now() >= streams) [streams, patience] = [Date.now() + patience, Math.min(2 * patience, 600_000)];
        way = Math.min(POLL, now + 1);
        wait = backoff(error, (failures += 1));
        if (failures > 1) onTrouble?.(error); // the first leads to another way
      }
    } finally {
      if (now < POLL) free += 1;
      PAGE?.removeEventListener("visibilitychange", hide);
    }
  }
}

// -- Elements. Data goes in as text only; styles go in as a constructed sheet, which a Content-Security-Policy permits.

const STYLE = `:host { display: block; font: inherit }
:host([hidden]), [hidden] { display: none }
p, ul { margin: .3em 0 0 }
[part=bar] { display: flex; height: var(--asynctask-height, .5em); margin-top: .4em; overflow: hidden;
  border: 1px solid transparent; border-radius: var(--asynctask-radius, 1em); background: var(--asynctask-track, #8884) }
[part~=fill] { width: 0; forced-color-adjust: none }
[part~=finish] { background: var(--asynctask-finish, #2e7d32) }
[part~=failed] { background: var(--asynctask-failed, #b26a00) }
[part~=error] { background: var(--asynctask-error, #c62828) }
[part~=cancelled] { background: var(--asynctask-cancelled, #757575) }
[part=problem]:not(:empty) { margin-top: .4em; padding-inline-start: .6em; border-inline-start: .25em solid var(--asynctask-error, #c62828) }
[part=live] { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }`;

const KINDS = ["finish", "failed", "error", "cancelled"];
/** All that the elements say, by language: that of the element's `lang`, or of what is around it; else English. */
const WORDS = {
  en: {
    splitting: "Reading the list", running: "Running", paused: "Paused", finalizing: "Closing", finished: "Finished", cancelled: "Cancelled",
    rejected: "Not accepted", failed: "refused", error: "errors", task: "Task", row: "Row", list: "List", start: "Start",
    upload: "Upload", lost: "No connection; it is tried again",
    again: "It is not known whether the list was taken. Send it again as it is: it is not taken twice.",
  },
  "zh-CN": {
    splitting: "正在读取列表", running: "运行中", paused: "已暂停", finalizing: "收尾中", finished: "已完成", cancelled: "已取消",
    rejected: "未接受", failed: "被拒绝", error: "错误", task: "任务", row: "行", list: "列表", start: "开始",
    upload: "上传", lost: "连接已断开，正在重试",
    again: "无法确定列表是否已被接收。请原样再次发送：不会重复接收。",
  },
  ja: {
    splitting: "リストを読み取り中", running: "実行中", paused: "一時停止中", finalizing: "終了処理中", finished: "完了", cancelled: "取り消し済み",
    rejected: "受付不可", failed: "拒否", error: "エラー", task: "タスク", row: "行", list: "リスト", start: "開始",
    upload: "アップロード", lost: "接続が切れました。再試行しています",
    again: "リストが受け付けられたかどうか分かりません。そのままもう一度送信してください。二重には受け付けられません。",
  },
};

const tongue = (node) => {
  const wanted = node.closest("[lang]")?.lang.split("-")[0].toLowerCase();
  return Object.keys(WORDS).find((each) => each.split("-")[0] === wanted) ?? "en";
};

const words = (node) => WORDS[tongue(node)];

const said = ({ state, progress: { percent, done }, counts, split }, node) => {
  const [its, count] = [words(node), (n) => n.toLocaleString(tongue(node))];
  return [
    its[state] ?? state, percent !== null && `${Math.floor(percent)} %`, counts.total > 0 && `${count(done)} / ${count(counts.total)}`,
    ...[["failed", counts.failed], ["error", counts.error], ["rejected", split.rejected]].map(([kind, n]) => n > 0 && `${its[kind]}: ${count(n)}`),
  ].filter(Boolean).join(" · ");
};

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

class Base extends (globalThis.HTMLElement ?? Object) {
  #stop;

  constructor() {
    super();
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(STYLE);
    this.attachShadow({ mode: "open" }).adoptedStyleSheets = [sheet];
  }

  disconnectedCallback() {
    this.#stop?.abort();
  }

  /** Where to ask and as whom; ends what was asked before. */
  begin() {
    this.#stop?.abort();
    this.#stop = new AbortController();
    return { url: this.getAttribute("src") ?? HOME, token: this.getAttribute("token"), signal: this.#stop.signal };
  }

  tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail, bubbles: true, composed: true }));
  }
}

export class AsyncTaskProgress extends Base {
  static observedAttributes = ["task", "token", "src"];
  progress = null;
  #bar = make("div", { part: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 },
    ...KINDS.map((kind) => make("span", { part: `fill ${kind}` })));
  #text = make("p", { part: "text" });
  #live = make("p", { part: "live", role: "status" });
  #step = "";

  constructor() {
    super();
    this.shadowRoot.append(this.#bar, this.#text, this.#live);
  }

  connectedCallback() {
    this.#bar.ariaLabel ??= words(this).task;
    this.#look();
  }

  attributeChangedCallback() {
    if (this.isConnected) this.#look();
  }

  async #look() {
    const asked = this.begin();
    await null; // further attributes may be set in the same turn
    const task = this.getAttribute("task");
    if (asked.signal.aborted || !task) return;
    try {
      const onChange = (progress) => asked.signal.aborted || this.#show(progress);
      const onTrouble = (error) => this.#say(error ? words(this).lost : said(this.progress, this), "lost");
      this.tell("done", await follow(task, { ...asked, onChange, onTrouble }));
    } catch (error) {
      if (asked.signal.aborted) return;
      this.#say(error.message, "problem");
      this.tell("problem", error);
    }
  }

  #show(progress) {
    const { counts, progress: { percent }, state, split, title, task_id: id } = (this.progress = progress);
    const all = Math.max(1, counts.total, split.state === "splitting" ? split.planned : 0);
    KINDS.forEach((kind, i) => { this.#bar.children[i].style.width = `${(100 * counts[kind]) / all}%`; });
    this.#bar.ariaLabel = title || `${words(this).task} ${id}`;
    this.#bar.ariaValueNow = percent;
    this.#bar.ariaValueText = said(progress, this);
    // A reader of screens hears every tenth, not every row.
    this.#say(said(progress, this), `${state} ${Math.floor(percent / 10)}`);
    this.tell("change", progress);
  }

  #say(text, step) {
    if (step !== "problem") this.#text.lang = this.#live.lang = tongue(this); // of an error it is the server's
    this.#text.textContent = text;
    if (step !== this.#step) this.#live.textContent = text;
    this.#step = step;
  }
}

export class AsyncTaskUpload extends Base {
  fields = null;
  #file = make("input", { part: "file", type: "file", required: "" });
  #sending = make("progress", { part: "sending", value: 0, hidden: "" });
  #problem = make("div", { part: "problem", role: "alert" });
  #task = make("asynctask-progress", { part: "progress", exportparts: ["bar", "fill", ...KINDS, "text"], hidden: "" });
  #list = make("slot", {});
  #start = make("slot", { name: "button" });

  constructor() {
    super();
    const label = make("label", { part: "label" }, this.#list, " ", this.#file);
    const button = make("button", { part: "button" }, this.#start);
    const form = make("form", { part: "form" }, label, " ", button);
    form.onsubmit = (event) => this.#send(event);
    this.shadowRoot.append(form, this.#sending, this.#problem, this.#task);
  }

  connectedCallback() {
    const { list, start, upload } = words(this);
    this.#list.textContent = list;
    this.#start.textContent = start;
    this.#sending.ariaLabel = upload;
    for (const node of [this.#list, this.#start, this.#task]) node.lang = tongue(this);
  }

  async #send(event) {
    event.preventDefault();
    if (!this.#sending.hidden) return; // a second click
    const asked = this.begin();
    this.#problem.replaceChildren();
    this.#task.hidden = true; // that of the list before
    this.#task.removeAttribute("task");
    Object.assign(this.#sending, { hidden: false, value: 0 });
    try {
      const onProgress = (share) => { this.#sending.value = share; };
      const task = await submit(this.#file.files[0], { ...asked, worker: this.getAttribute("worker"), fields: this.fields, onProgress });
      const shown = { src: asked.url, token: asked.token ?? "", task: task.task_id };
      for (const [name, value] of Object.entries(shown)) this.#task.setAttribute(name, value);
      this.#task.hidden = false;
      this.tell("submitted", task);
    } catch (error) {
      if (asked.signal.aborted) return;
      this.#problem.append(...problem(error, words(this)));
      this.tell("problem", error);
    } finally {
      this.#sending.hidden = true;
    }
  }
}

/** What is wrong, with the first rows. */
function problem({ message, unknown, problem: told }, its) {
  const rows = (told?.errors ?? []).slice(0, 10).map((each) =>
    make("li", {}, [each.row && `${its.row} ${each.row}`, each.column, each.message].filter(Boolean).join(": ")));
  return [make("p", {}, message, unknown ? ` ${its.again}` : ""), make("ul", {}, ...rows)];
}

for (const [name, its] of [["asynctask-progress", AsyncTaskProgress], ["asynctask-upload", AsyncTaskUpload]]) {
  if (!globalThis.customElements?.get(name)) globalThis.customElements?.define(name, its); // not where a server renders
}
