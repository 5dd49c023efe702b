// Talking to the server: errors as problems, and polling that survives a server that is away.

const LONGEST_WAIT = 15_000;
const WHEN_DONE = 15_000;

/** An answer that is no success; `problem` is its problem+json, or something like it. */
export class Refused extends Error {
  constructor(problem) {
    super(problem.detail);
    this.problem = problem;
  }
}

const AWAY = { status: 0, detail: "The server does not answer. Nothing was changed; try again in a moment.", errors: [] };

/** JSON from `url`; throws Refused. */
export async function call(url, { method = "GET", body } = {}) {
  const options = { method, headers: { Accept: "application/json" } };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new Refused(AWAY);
  }
  const answer = await parsed(response);
  if (!response.ok) throw new Refused(answer ?? { ...AWAY, status: response.status });
  return answer;
}

async function parsed(response) {
  try {
    return await response.json();
  } catch {
    return null;
  }
}

/** Sends a form with its file; `onSent` gets the share that has gone, 0 to 1. Throws Refused. */
export function upload(url, form, onSent) {
  // XMLHttpRequest, because fetch does not say how much of a body has gone.
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", url);
    request.responseType = "json";
    request.upload.addEventListener("progress", (e) => e.lengthComputable && onSent(e.loaded / e.total));
    request.addEventListener("error", () => reject(new Refused({
      ...AWAY, detail: "The connection broke while the file was being sent. Try again; if it happens again, the file may be over the server's limit, or may have changed since it was chosen.",
    })));
    request.addEventListener("load", () => {
      if (request.status >= 200 && request.status < 300 && request.response) resolve(request.response);
      else reject(new Refused(request.response ?? { ...AWAY, status: request.status }));
    });
    request.send(form);
  });
}

/**
 * Asks `url` again and again: with the ETag of the last answer, as soon as the answer says (`poll_after_ms`, else `every`),
 * slowly when it is done or the page is hidden, with growing pauses while the server is away.
 */
export class Poller {
  constructor(url, { every = 3000, onData, onGone = () => {} }) {
    Object.assign(this, { url, every, onData, onGone, etag: null, pause: every, failures: 0, timer: null, busy: false, again: false });
    document.addEventListener("visibilitychange", () => !document.hidden && this.now());
    window.addEventListener("online", () => this.now());
  }

  start() {
    this.now();
    return this;
  }

  /** Asks at once. */
  now() {
    clearTimeout(this.timer);
    if (this.busy) this.again = true;
    else this.ask();
  }

  async ask() {
    this.busy = true;
    const { url } = this; // it may be another one when the answer comes
    try {
      const headers = { Accept: "application/json", ...(this.etag ? { "If-None-Match": this.etag } : {}) };
      const response = await fetch(url, { headers, signal: AbortSignal.timeout(20_000) });
      if (response.status === 404 || response.status === 410) {
        this.onGone(await parsed(response));
        return;
      }
      if (!response.ok && response.status !== 304) throw new Error(String(response.status));
      if (url === this.url) await this.take(response);
      this.failures = 0;
    } catch {
      this.failures += 1;
    } finally {
      this.busy = false;
    }
    lost(this, this.failures > 0);
    if (this.again) {
      this.again = false;
      this.now();
    } else this.timer = setTimeout(() => this.ask(), this.wait());
  }

  async take(response) {
    if (response.status === 304) return;
    const data = await response.json();
    this.etag = response.headers.get("ETag");
    this.pause = data.done ? WHEN_DONE : (data.poll_after_ms ?? this.every);
    this.onData(data);
  }

  wait() {
    // Spread a little, so that the pages of many people do not all return at the same moment.
    if (this.failures) return Math.min(LONGEST_WAIT, 500 * 2 ** Math.min(this.failures, 6)) * (0.75 + Math.random() / 2);
    return Math.max(250, document.hidden ? this.pause * 5 : this.pause);
  }
}

const away = new Set();

function lost(poller, isLost) {
  if (isLost) away.add(poller);
  else away.delete(poller);
  const note = document.getElementById("connection");
  if (note.hidden === away.size > 0) note.hidden = away.size === 0;
}
