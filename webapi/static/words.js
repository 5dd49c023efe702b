// Numbers, times and states as people say them.

const numbers = new Intl.NumberFormat();
const rates = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

export const count = (n) => numbers.format(n);
export const rows = (n) => `${count(n)} ${n === 1 ? "row" : "rows"}`;
/** A number of rows with its verb: "1 row was", "2 rows were". */
const rowsThat = (n, one, many) => `${rows(n)} ${n === 1 ? one : many}`;

/** Seconds as "about 3 min". */
export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${rates.format(seconds / 3600)} h`;
  return `${rates.format(seconds / 86400)} days`;
}

export const when = (text) => (text ? new Date(text).toLocaleString() : "–");

export const STATES = {
  splitting: "reading", running: "running", paused: "paused", finalizing: "closing", finished: "finished",
  cancelled: "cancelled", rejected: "rejected",
};

/** Of a single job. */
export const STATUSES = {
  enqueue: "waiting", working: "running", stopped: "stopped", finish: "succeeded", failed: "refused", error: "error",
  cancelled: "cancelled",
};

export const KINDS = { failed: "refused", error: "error" };

export const CALLBACKS = { on_complete: "Called at the end", on_success: "Called if all succeed", on_failure: "Called if any does not" };
export const CALLED = {
  enqueue: "waiting", working: "running", stopped: "stopped", finish: "done", failed: "refused", error: "failed", cancelled: "cancelled",
};

export const COUNTS = [
  ["finish", "succeeded"], ["failed", "refused"], ["error", "errors"], ["cancelled", "cancelled"],
  ["working", "running"], ["enqueue", "waiting"], ["stopped", "stopped"],
];

const unsuccessful = (c) => c.failed + c.error;

/** What a Task does now, in a sentence. */
export function sentence(p) {
  const { counts: c } = p;
  const broken = p.split.state === "failed" ? ` The list could not be read to its end: ${why(p)}` : "";
  const waits = p.retrying ? ` ${rowsThat(p.retrying, "waits", "wait")} for another try.` : "";
  switch (p.state) {
    case "splitting": return `Reading the list: ${rows(c.total)} so far.${waits}`;
    case "running": return running(p) + waits + broken;
    case "paused": return paused(p);
    case "finalizing": return "Every row is done; what is to follow is under way.";
    case "finished": return finished(p) + broken;
    case "cancelled": return p.done ? `Cancelled: ${rowsThat(c.cancelled, "was", "were")} not run.${lost(p)}` : "Being cancelled: nothing new is started.";
    case "rejected": return rejected(p);
    default: return p.state;
  }
}

function running(p) {
  if (p.state_reason === "waiting_for_session") return "Waiting for its session.";
  if (p.state_reason === "stopped_jobs") return "Only stopped jobs are left; they wait to be started again.";
  if (p.counts.working + p.control.in_flight === 0 && p.started_at === null) return "Waiting for a worker to begin.";
  return "Running.";
}

function paused(p) {
  if (p.state_reason !== "too_many_failures") return "Paused: nothing new is started until you resume it.";
  const { tolerated_failures: tolerated } = p.control;
  return `Paused by itself: more rows failed than are tolerated (${tolerated}). Raise that, or retry the failed rows, and it goes on.`;
}

function finished(p) {
  const bad = unsuccessful(p.counts);
  const rejected = p.split.rejected ? ` ${rowsThat(p.split.rejected, "was", "were")} not taken.` : "";
  if (bad === 0) return `Finished: every row that was taken succeeded.${rejected}${lost(p)}`;
  return `Finished: ${rows(bad)} of ${count(p.counts.total)} did not succeed.${rejected}${lost(p)}`;
}

const lost = (p) => (p.state_reason === "callback_failed" ? " What should have followed it failed." : "");

/** The words of the reason, which the API gives after its code. */
const why = ({ split }) => (split.reason ?? "").replace(/^[a-z_]+: /, "");

/** Why a list was refused. What is wrong with its rows stands below. */
function rejected(p) {
  const { split } = p;
  if (split.reason) return `Rejected: ${why(p)}`;
  if (split.rejected === 0) return "Rejected: the list has no rows.";
  if (p.state_reason === "rows_rejected") return `Rejected as a whole: ${rowsThat(split.rejected, "is", "are")} not in order.`;
  return split.rejected === 1 ? "Rejected: its only row could not be taken." : `Rejected: none of its ${rows(split.rejected)} could be taken.`;
}

/** Rate and time left, or "" where nothing is known. */
export function pace(p) {
  if (p.done) return p.started_at && p.finished_at ? `took ${duration((new Date(p.finished_at) - new Date(p.started_at)) / 1000)}` : "";
  const parts = [];
  if (p.progress.rate_per_s) parts.push(`${rates.format(p.progress.rate_per_s)} rows/s`);
  if (p.progress.eta_s !== null && p.progress.eta_s !== undefined && p.state !== "paused") parts.push(`about ${duration(p.progress.eta_s)} left`);
  return parts.join(", ");
}

/** The parts of the bar: what has ended, by outcome, out of what there is. */
export function segments(p) {
  // While the list is read its rows are only partly there; rows that are not taken do not count in the end.
  const expected = p.split.state === "splitting" ? (p.split.planned ?? 0) : 0;
  const all = Math.max(p.counts.total, expected, 1);
  return ["finish", "failed", "error", "cancelled"].map((kind) => [kind, p.counts[kind] / all]);
}

/** How much of the bar is reached, for readers of screens; null while nobody knows. Of a list that was rejected it is nothing. */
export const reached = (p) => (p.done ? (p.progress.percent ?? 0) : p.progress.percent);

/** Percent and number of rows, where there are any. */
export const amount = (p) => (p.counts.total || !p.done ? `${percent(p)} of ${count(p.counts.total)} · ` : "");

export const percent = (p) => (p.progress.percent === null ? "–" : `${p.progress.percent} %`);
