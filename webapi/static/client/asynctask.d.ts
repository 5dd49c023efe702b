/** An item of a list: what one job gets. */
export type Item = unknown;

/** The rights of a request: the secret of a token, or the text of a signed link. Without one, the visitor's cookies. */
export type Token = string | null;

export type State = "splitting" | "running" | "paused" | "finalizing" | "finished" | "cancelled" | "rejected";

/** The progress object of a Task; the HTTP reference (GET /api/tasks/ID) describes each member. */
export interface Progress {
  task_id: number;
  title: string;
  worker: string;
  owner: string | null;
  state: State;
  state_reason: string | null;
  /** Whether all rows have ended, and what follows them has run. */
  done: boolean;
  split: {
    state: "splitting" | "open" | "sealed" | "failed";
    reason: string | null;
    planned: number | null;
    created: number;
    /** Rows that were not accepted. */
    rejected: number;
    open_until: string | null;
  };
  counts: {
    total: number;
    enqueue: number;
    working: number;
    stopped: number;
    finish: number;
    failed: number;
    error: number;
    cancelled: number;
  };
  progress: {
    done: number;
    remaining: number;
    /** Null until the whole list has been read, and if no row was accepted. */
    percent: number | null;
    rate_per_s: number | null;
    eta_s: number | null;
  };
  generation: number;
  version: number;
  poll_after_ms: number;
  created_at: string;
  started_at: string | null;
  finished_at: string | null;
  /** Paths on the server: `report` is the sheet of the rows to correct, `ui` the page of the Task. */
  links: Record<"self" | "events" | "errors" | "report" | "result" | "stream" | "ui", string>;
  /** Members that this version of the types does not name. */
  [member: string]: unknown;
}

/** A fault of a row, or of the list. */
export interface Fault {
  /** The number of the row in the sheet. */
  row: number | null;
  column: string | null;
  code: string;
  message: string;
  value: unknown;
}

/** The answer to a submission: the Task, and the rows that were not accepted, if the server has looked at them already. */
export interface Submitted extends Progress {
  errors: Fault[] | null;
}

/** The answer to a submission with the field `dry_run`: nothing was stored. */
export interface DryRun {
  dry_run: true;
  accepted: number;
  rejected: number;
  errors: Fault[];
  errors_truncated: boolean;
  first_items: Item[];
}

/** An error of the API (RFC 9457). */
export interface Problem {
  type: string;
  title: string;
  status: number;
  /** What is wrong and how to mend it, in the reader's language. */
  detail: string;
  instance: string;
  code: string;
  errors: Fault[];
  [member: string]: unknown;
}

/** A request without its result. `message` is the API's `detail`, if it wrote the answer. */
export class AsyncTaskError extends Error {
  /** The status of the answer; 0: none came, or the server does not allow this origin (`allowed_origins`). */
  readonly status: number;
  /** What the API said; null if the answer is a proxy's, or none came. */
  readonly problem: Problem | null;
  /** The code of the problem, which stays the same in every language. */
  readonly code: string | null;
  /** Whether the request may have done what it was to do: send it again, with the same key. */
  readonly unknown: boolean;
  /** Whether the API refuses, and would refuse the same request again. */
  readonly final: boolean;
  /** Of Retry-After, in milliseconds; 0 without it. */
  readonly retryMs: number;
}

export interface Server {
  /** Of the web server, with its path if it has one; default: the server that this module was loaded from. */
  url?: string | URL;
  token?: Token;
  /** Ends it; the promise is then rejected with the signal's reason. */
  signal?: AbortSignal;
}

export interface SubmitOptions extends Server {
  worker?: string;
  /** Further options of the submission: title, parallel, strict, ... */
  fields?: Record<string, unknown> | null;
  /**
   * Default: a random one, kept in `sessionStorage` until the list has an answer. The same list, sent again after its answer was
   * lost, becomes no second Task, also after a reload: a file is the same by name, size and time, with the same fields.
   */
  idempotencyKey?: string;
  /** Gets the share of the body that has gone, 0 to 1. */
  onProgress?: (share: number) => void;
}

/** Submits a file, a form that has one as `file`, or items. Resolves once the server has stored the list. */
export function submit(
  list: Blob | FormData | Item[],
  options: SubmitOptions & { fields: { dry_run: true } & Record<string, unknown> },
): Promise<DryRun>;
export function submit(list: Blob | FormData | Item[], options?: SubmitOptions): Promise<Submitted>;

export interface FollowOptions extends Server {
  /** Gets each progress object that differs from the one before. */
  onChange?: (progress: Progress) => void;
  /** Gets the error of the second request in a row without a result, and of those after it; null once it goes on. */
  onTrouble?: (error: AsyncTaskError | null) => void;
}

/**
 * Follows a Task until it is done; resolves to its last progress object. Asks by the event stream; where that does not get through,
 * by long polls; where the server holds none, after `poll_after_ms`. After a failure it waits longer each time, up to 15 s or the
 * time of Retry-After (at most a minute), and goes on for as long as it takes; it is rejected where the API refuses, with the token
 * for instance (`final`). It asks nothing while the page is hidden. At most three calls of a page hold a request; others poll. A stream that
 * did not get through is tried again after half a minute, by any call of the page, and later each time.
 */
export function follow(task: number | string, options?: FollowOptions): Promise<Progress>;

/**
 * `<asynctask-progress task="7" token="..." src="https://tasks.example.com">`: a bar, its words, and a live region. `src` is `url` of the
 * functions. Parts: `bar`, `fill` with `finish`, `failed`, `error` or `cancelled`, `text`. Custom properties: `--asynctask-height`, `-radius`,
 * `-track`, and a colour by the name of each fill. Its events bubble: `change` and `done`, whose `detail` is the progress object, and
 * `problem`, an AsyncTaskError that ends the following. Its words are those of the language (`lang`) around it: English, Chinese or Japanese.
 */
export class AsyncTaskProgress extends HTMLElement {
  /** The last one. */
  readonly progress: Progress | null;
}

/**
 * `<asynctask-upload worker="enroll" token="..." src="...">List <b slot="button">Start</b></asynctask-upload>`: a field for a file, a button, what is
 * wrong with the list, and the progress of its Task. Parts: `form`, `label`, `file`, `button`, `sending`, `problem`, and those of the progress.
 * Events: `submitted`, whose `detail` is the answer, and those of the progress.
 */
export class AsyncTaskUpload extends HTMLElement {
  /** Further options of the submission. */
  fields: Record<string, unknown> | null;
}

export interface AsyncTaskEvents {
  change: CustomEvent<Progress>;
  done: CustomEvent<Progress>;
  submitted: CustomEvent<Submitted>;
  problem: CustomEvent<AsyncTaskError>;
}

declare global {
  interface HTMLElementTagNameMap {
    "asynctask-progress": AsyncTaskProgress;
    "asynctask-upload": AsyncTaskUpload;
  }
}
