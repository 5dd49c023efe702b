// Numbers, times and states as people say them.

import { filled, language, locale, t, tn } from "./i18n.js";

/** What the server's catalogues have for this page: `of_server` of texts.py. */
const { messages, reasons } = JSON.parse(document.body.dataset.ofServer);

const numbers = new Intl.NumberFormat(locale);
const percentages = new Intl.NumberFormat(locale, { style: "percent", maximumFractionDigits: 0 });
const rates = new Intl.NumberFormat(locale, { maximumFractionDigits: 1 });

export const count = (n) => numbers.format(n);
/** What the items of a Task are to people: a number of them. */
export const ROWS = (n) => tn("{n} row", "{n} rows", n);
/** Of an export. */
export const SHARDS = (n) => tn("{n} shard", "{n} shards", n);
export const rows = (n, of = ROWS) => of(n);
export const jobs = (n) => tn("{n} job", "{n} jobs", n);
/** A whole number of percents. */
export const percents = (n) => percentages.format(n / 100);
/** A part of a whole in percents. */
export const portion = (n, all) => percents(Math.round((100 * n) / all));
export const rate = (n) => rates.format(n);
/** Memory: "120 MB". */
export const bytes = (n) => `${numbers.format(Math.round(n / 1_000_000))} MB`;

/** Several values as a list: "a, b". */
export const listed = (each) => each.join(t(", "));

/** A name and what it says: "Paused: 3 refused"; the name alone where it says nothing. */
const labelled = (name, text) => (text === "" ? name : name + t(": ") + text);

const MARKS = /[\u2066-\u2069]/g;
const between = (mark, text) => `${mark}${String(text).replace(MARKS, "")}\u2069`;
/** A text of users in one of ours, between the marks of Unicode for its own direction: `mixed` of dom.js makes an element of it. */
export const own = (text) => between("\u2068", text);
/** The same of what the server says in English alone. */
const inEnglish = (text) => between("\u2066", text);

/** Sentences one after the other, without those that are empty. */
export const sentences = (...each) => each.filter(Boolean).join(language === "en" ? " " : "");

/** Seconds as "about 3 min". */
export function duration(seconds) {
  if (seconds < 1) return t("less than a second");
  if (seconds < 90) return t("{n} s", { n: count(Math.round(seconds)) });
  if (seconds < 5400) return t("{n} min", { n: count(Math.round(seconds / 60)) });
  if (seconds < 129600) return t("{n} h", { n: rates.format(seconds / 3600) });
  return t("{n} days", { n: rates.format(seconds / 86400) });
}

/** What ended in the last hour, for those who do not see its chart. */
export function endedInHour({ finish, failed, error }) {
  const n = finish + failed + error;
  if (error) return tn("{n} row has ended in the last hour, {errors} of them with an error", "{n} rows have ended in the last hour, {errors} of them with an error", n, { errors: count(error) });
  return tn("{n} row has ended in the last hour", "{n} rows have ended in the last hour", n);
}

export const when = (text) => (text ? new Date(text).toLocaleString(locale) : "–");

const days = new Intl.DateTimeFormat(locale, { dateStyle: "medium" });
const relative = new Intl.RelativeTimeFormat(locale, { style: "short" });
const MONTH_S = 30 * 86400;
const UNITS = [["second", 1, 90], ["minute", 60, 5400], ["hour", 3600, 129600], ["day", 86400, Infinity]];

/** A time as people say it: "3 min. ago", "in 20 sec."; from a month on, the day. */
export function ago(text) {
  const seconds = (new Date(text) - Date.now()) / 1000;
  if (Math.abs(seconds) >= MONTH_S) return days.format(new Date(text));
  if (Math.abs(seconds) < 5) return t("just now");
  const [unit, length] = UNITS.find(([, , most]) => Math.abs(seconds) < most);
  return relative.format(Math.round(seconds / length), unit);
}

/** The time zone of all times shown: "Europe/Berlin (GMT+2)". */
export function zone() {
  const parts = new Intl.DateTimeFormat("en", { timeZoneName: "shortOffset" }).formatToParts(new Date());
  const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
  const offset = parts.find(({ type }) => type === "timeZoneName").value;
  return timeZone === offset ? offset : `${timeZone} (${offset})`;
}

export const STATES = {
  splitting: t("reading"), running: t("running"), paused: t("paused"), finalizing: t("closing"), finished: t("finished"),
  cancelled: t("cancelled"), rejected: t("not accepted"),
};

/** Of a single job. */
export const STATUSES = {
  enqueue: t("waiting"), working: t("running"), stopped: t("stopped"), finish: t("succeeded"), failed: t("refused"), error: t("error"),
  cancelled: t("cancelled"),
};

/** How many ticks of a schedule have no Task, and why the last one has none. */
export const skipped = (number, reason) => {
  const n = count(number);
  return {
    missed: t("{n} skipped, because no process ran", { n }), overlap: t("{n} skipped, because the Task before was open", { n }),
    empty: t("{n} skipped, because there was no item", { n }), refused: t("{n} skipped, because the items were refused", { n }),
  }[reason];
};

/** What a list would become, of the result of its check. */
export function acceptance({ accepted, rejected }) {
  if (rejected === 0) return accepted === 1 ? t("Its only row will be accepted.") : t("All {rows} will be accepted.", { rows: rows(accepted) });
  if (accepted === 0) return rejected === 1 ? t("Its only row is not accepted.") : t("None of its {rows} is accepted.", { rows: rows(rejected) });
  return t("{rows} will be accepted, {rejected} not.", { rows: rows(accepted), rejected: count(rejected) });
}

export const KINDS = { failed: t("refused"), error: t("error") };

export const CALLBACKS = { on_complete: t("Called at the end"), on_success: t("Called if all succeed"), on_failure: t("Called if any does not") };
export const CALLED = { ...STATUSES, finish: t("done") };

export const COUNTS = [
  ["finish", t("succeeded")], ["failed", t("refused")], ["error", t("errors")], ["cancelled", t("cancelled")],
  ["working", t("running")], ["enqueue", t("waiting")], ["stopped", t("stopped")],
];

const unsuccessful = (c) => c.failed + c.error;

/** Whether a Task waits for its start time. */
const startsLater = (p) => Boolean(p.control.start_at) && p.started_at === null && new Date(p.control.start_at) > Date.now();

const notBefore = (p) => (startsLater(p) ? t("Nothing starts before {time}.", { time: when(p.control.start_at) }) : "");

/** How many rows of a Task did not succeed there, of whatever kind. */
const unlike = ({ counts: c, split }) => c.failed + c.error + c.cancelled + split.rejected;

/** Whether all that did not succeed in a Task has succeeded since in those that correct it. */
const isMended = (p) => p.mended > 0 && p.mended >= unlike(p);

/** The word and the colour of a Task. What ended without a success, or not whole, does not look like one that succeeded. */
export function badge(p) {
  const bad = unsuccessful(p.counts);
  if (p.state === "running" && startsLater(p)) return [t("scheduled"), "scheduled"];
  if (p.state === "finished" && isMended(p)) return [t("finished, mended"), "finished"];
  if (p.state !== "finished" || bad + p.split.rejected === 0) return [STATES[p.state] ?? p.state, p.state];
  if (bad > 0 && p.counts.finish + p.mended === 0) return [t("nothing succeeded"), "error"];
  return [bad > 0 ? t("finished with failures") : t("finished in part"), "partial"];
}

/** What a Task does now, in a sentence that may have parts in English. `of`: what its items are, ROWS or SHARDS. */
export function sentence(p, of = ROWS) {
  const { counts: c } = p;
  const broken = p.split.state === "failed" && t("The list could not be read to its end: {reason}", { reason: because(p.split.reason) });
  const waits = p.retrying > 0 && waiting(p, of);
  switch (p.state) {
    case "splitting": return sentences(p.split.state === "open" ? t("Open: {rows} so far, and more may be added.", { rows: of(c.total) }) : t("Reading the list: {rows} so far.", { rows: of(c.total) }), notBefore(p), waits);
    case "running": return sentences(running(p, of), waits, broken);
    case "paused": return sentences(paused(p, of), notBefore(p));
    case "finalizing": return of === SHARDS ? t("Every shard is done; the file is put together.") : t("Every row is done; what is to follow is under way.");
    case "finished": return sentences(...finished(p, of), broken);
    case "cancelled": return p.done ? sentences(notRun(c.cancelled, of), lost(p)) : t("Being cancelled: nothing new is started.");
    case "rejected": return rejected(p);
    default: return p.state;
  }
}

const notRun = (n, of) => tn("Cancelled: {rows} was not run.", "Cancelled: {rows} were not run.", n, { rows: of(n) });

/**
 * A message of an Event: the middleware's words in the reader's language, the application's between marks. "Failed: " and "Error: " are left
 * out: the status stands beside the message.
 */
export function heard(message) {
  for (const [written, text] of messages) {
    const [before, after] = written.split("{0}");
    if (after === undefined ? message === before : message.startsWith(before) && message.endsWith(after)) {
      return text.replace("{0}", () => own(message.slice(before.length, message.length - (after ?? "").length)));
    }
  }
  return own(message);
}

/** What a group of failures says, without marks: what they have in common, or the message of a single one. */
export const saidBy = (group) => heard(group.count === 1 ? group.message : group.template).replace(MARKS, "");

/** How many rows wait for another try, and the error for which most of them do. */
function waiting(p, of) {
  const [first] = p.retrying_errors ?? [];
  const [said, values] = [first ? saidBy(first) : "", { rows: of(p.retrying) }];
  if (!said) return tn("{rows} waits for another try.", "{rows} wait for another try.", p.retrying, values);
  const error = own(said.length > 120 ? `${said.slice(0, 119)}…` : said);
  return tn("{rows} waits for another try: {error}.", "{rows} wait for another try: {error}.", p.retrying, { ...values, error });
}

function running(p, of) {
  if (startsLater(p)) return notBefore(p);
  if (p.state_reason === "waiting_for_session") return t("Waiting for its session.");
  if (p.state_reason === "waiting_for_children") return of === SHARDS ? t("Its shards have ended; it waits for the Tasks below it.") : t("Its rows have ended; it waits for the Tasks below it.");
  if (p.state_reason === "stopped_jobs") return t("Only stopped jobs are left; they wait to be started again.");
  if (p.counts.working + p.control.in_flight === 0 && p.started_at === null) return t("Waiting for a worker to begin.");
  return t("Running.");
}

function paused(p, of) {
  if (p.state_reason === "parent_paused") return t("Paused with the Task above it, and resumed with it.");
  if (p.state_reason !== "too_many_failures") return t("Paused: nothing new is started until you resume it.");
  const { tolerated_failures: tolerated } = p.control;
  if (of === SHARDS) return t("Paused by itself: more shards failed than are tolerated ({tolerated}). Raise that, or retry the failed shards, and it goes on.", { tolerated });
  return t("Paused by itself: more rows failed than are tolerated ({tolerated}). Raise that, or retry the failed rows, and it goes on.", { tolerated });
}

/** The sentences of a Task that has finished. */
function finished(p, of) {
  const bad = unsuccessful(p.counts);
  const n = p.split.rejected;
  if (isMended(p)) return [t("Finished: every row succeeded, here or in a Task that corrects this one."), lost(p)];
  const apart = n > 0 && tn("{n} row was not accepted.", "{n} rows were not accepted.", n);
  if (bad === 0) return [of === SHARDS ? t("Finished: every shard succeeded.") : t("Finished: every row that was accepted succeeded."), apart, lost(p)];
  if (bad === p.counts.total && bad > 1) return [t("Finished: none of {rows} succeeded.", { rows: of(bad) }), apart, lost(p)];
  return [t("Finished: {rows} of {total} did not succeed.", { rows: of(bad), total: count(p.counts.total) }), apart, lost(p)];
}

const lost = (p) => (p.state_reason === "callback_failed" ? t("What should have followed it failed.") : "");

/** Why a list was not taken, of the API's code and its English words. */
function because(reason) {
  const [, code, detail] = /^(?:([a-z_]+): )?(.*)$/s.exec(reason ?? "");
  return Object.hasOwn(reasons, code) ? reasons[code].replace("{detail}", () => inEnglish(detail)) : detail;
}

/** Why a list was refused. What is wrong with its rows stands below. */
function rejected(p) {
  const { split: { reason, rejected: n } } = p;
  if (reason) return t("Not accepted: {reason}", { reason: because(reason) });
  if (n === 0) return t("Not accepted: the list has no rows.");
  if (p.state_reason === "rows_rejected") return tn("Not accepted as a whole: {n} row is not in order.", "Not accepted as a whole: {n} rows are not in order.", n);
  return n === 1 ? t("Not accepted: its only row is not in order.") : t("Not accepted: none of its {rows} is in order.", { rows: rows(n) });
}

/** Rate and time left, or "" where nothing is known. Of a Task that ran again nobody knows when its last run began. */
export function pace(p, of = ROWS) {
  if (p.done) return p.generation === 1 && p.started_at && p.finished_at ? t("took {time}", { time: duration((new Date(p.finished_at) - new Date(p.started_at)) / 1000) }) : "";
  const parts = [];
  if (p.progress.rate_per_s) {
    const rate = rates.format(p.progress.rate_per_s);
    parts.push(of === SHARDS ? t("{rate} shards/s", { rate }) : t("{rate} rows/s", { rate }));
  }
  const left = p.progress.eta_s;
  if (left && !["paused", "finalizing"].includes(p.state)) parts.push(left < 1 ? t("less than a second left") : t("about {time} left", { time: duration(left) }));
  return parts.join(t(", "));
}

/** What the state does not say by itself: why a Task waits, was not accepted, or is not whole. */
export function remark(p) {
  const said = sentence(p);
  const isPlain = said === t("Running.") || (p.state === "finished" && p.state_reason === null && p.split.state !== "failed");
  return isPlain ? "" : said;
}

/** The rows that are not as they should be, by kind: what did not succeed, was not accepted, and has been mended since. */
export function problems(p) {
  const { failed, error } = p.counts;
  return [
    ["failed", failed, t("{n} refused", { n: count(failed) })],
    ["error", error, tn("{n} error", "{n} errors", error)],
    ["rejected", p.split.rejected, t("{n} not accepted", { n: count(p.split.rejected) })],
    ["mended", p.mended, t("{n} mended", { n: count(p.mended) })],
  ].filter(([, number]) => number > 0).map(([kind, , text]) => [kind, text]);
}

/**
 * The parts of the bar, out of all rows of the file: what has ended, by outcome, what was mended, what was not accepted, and what runs. Nobody
 * knows which of the rows that did not succeed were mended: each kind has its share of them.
 */
export function segments(p) {
  // While the list is read its rows are only partly there.
  const expected = p.split.state === "splitting" ? (p.split.planned ?? 0) : 0;
  const all = Math.max(p.counts.total + p.split.rejected, expected, 1);
  const bad = unlike(p);
  const mended = Math.min(p.mended, bad);
  const still = bad > 0 ? 1 - mended / bad : 1;
  const { finish, failed, error, cancelled, working } = p.counts;
  const numbers = { finish, mended, failed: still * failed, error: still * error, cancelled: still * cancelled, rejected: still * p.split.rejected, working };
  return Object.entries(numbers).map(([kind, number]) => [kind, number / all]);
}

/** How many rows are to be corrected or run in a Task once it is done; those that went to a Task that corrects it are not. */
export const left = (p) => Math.max(0, unlike(p) - p.resubmitted);

/** How many rows are certain to be there for a retry of these statuses: the server leaves out those that went to another Task. */
export const retriable = (p, ...statuses) => statuses.reduce((sum, status) => sum + p.counts[status], -p.resubmitted);

/** The heading and the text of what is to be done next; the text may be empty. */
export function nextStep(p, of = ROWS) {
  const files = t("Files");
  const mended = p.mended ? tn("{rows} was mended since.", "{rows} were mended since.", p.mended, { rows: of(p.mended) }) : "";
  if (!p.done) return [files, mended];
  const [n, away] = [left(p), Math.min(p.resubmitted, unlike(p)) - p.mended];
  if (n === 0 && away > 0) return [tn("{rows} left, in the Task that corrects this one", "{rows} left, in the Tasks that correct this one", p.resubmitted_by.length, { rows: of(away) }), mended];
  if (n === 0 && p.counts.total + p.split.rejected > 0) return [t("Nothing is left to do"), mended || (of === SHARDS ? t("Every shard succeeded.") : t("Every row succeeded."))];
  if (n === 0 || p.state_reason === "rows_rejected" || of === SHARDS) return [files, mended];
  if (p.state === "cancelled" && n === p.counts.cancelled) return [t("{rows} left: run them, or download them", { rows: rows(n) }), mended];
  const sent = away > 0 && tn("{rows} that was sent again is not taken twice.", "{rows} that were sent again are not taken twice.", away, { rows: rows(away) });
  return [t("{rows} left: download, correct, upload", { rows: rows(n) }), sentences(mended, sent)];
}

/** The statuses that the table of rows can be limited to: [statuses of the API, word]. */
export const FILTERS = [
  ["", t("all")], ["failed,error", t("did not succeed")], ["finish", t("succeeded")], ["failed", t("refused")], ["error", t("errors")],
  ["cancelled", t("cancelled")], ["working", t("running")], ["enqueue", t("waiting")], ["stopped", t("stopped")],
];

// -- The log of a Task -------------------------------------------------------------------------------------------------

export const KNOBS = {
  parallel: t("Jobs at once"), interval: t("Seconds from round to round"), priority: t("Priority"),
  tolerated_failures: t("Pause after more failures than"), title: t("Title"), start_at: t("Starts at"),
};

const DONE = {
  submitted: t("The list was submitted"), paused: t("Paused"), resumed: t("Resumed"), cancelled: t("Cancelled"), sealed: t("Sealed"), added: t("Rows added"), linked: t("A link was made"),
  closed: t("Every row has ended"), finished: t("Finished"), "split sealed": t("The list was read"), "split open": t("Open for more rows"),
  "split failed": t("The list could not be read to its end"), "split cancelled": t("The reading of the list was ended"),
  "callbacks retried": t("What follows runs again"), called_back: t("What follows is done"), callback_failed: t("What should have followed failed"),
  "jobs retried": t("Jobs run again"), "jobs restarted": t("Jobs started"), "jobs cancelled": t("Jobs cancelled"), "jobs killed": t("Jobs given up"),
  "jobs stopped": t("Jobs stopped"), "jobs dismissed": t("Jobs dismissed"), "counts repaired": t("The counts were repaired"),
};

/** The details of an entry; "" for those that the entry says otherwise, or that are for programs. */
const DETAILS = {
  title: (text) => (text ? labelled(t("Title"), own(text)) : ""), worker: (name) => labelled(t("Worker"), own(name)), owner: (name) => labelled(t("Owner"), own(name)),
  accepted: (n) => t("{n} accepted", { n: count(n) }), rejected: (n) => t("{n} not accepted", { n: count(n) }),
  after_row: (n) => (n > 0 ? t("after row {row}", { row: count(n) }) : ""), failed: (n) => t("{n} refused", { n: count(n) }),
  error: (n) => tn("{n} error", "{n} errors", n), tolerated_failures: (value) => labelled(KNOBS.tolerated_failures, knobValue("tolerated_failures", value)),
  generation: (n) => (n > 1 ? t("run {n}", { n: count(n) }) : ""), jobs, first: (job) => t("the first is {job}", { job: own(job) }), callbacks: () => "",
  expires_at: (time) => t("valid until {time}", { time: when(time) }), with_task: (task) => t("with Task {task}", { task }),
  reason: (text) => ({ ...WAITS, open_limit: t("Nobody added anything in time.") }[text] ?? because(text)), message: () => "", text: () => "",
};

function knobValue(name, value) {
  if (value === null || value === undefined || value === "") return t("none");
  if (name === "title") return own(value);
  return name === "start_at" ? when(value) : String(value);
}

/** A knob that was turned: "Priority: 0 → 5". */
export const turned = (name, before, after) => t("{knob}: {before} → {after}", { knob: KNOBS[name], before: knobValue(name, before), after: knobValue(name, after) });

/** The knobs that an entry of the log changed: [name, old value, new value]. */
export const changes = ({ action, detail }) => (action !== "changed" || detail === null ? [] :
  Object.entries(detail).filter(([name, pair]) => name in KNOBS && Array.isArray(pair)).map(([name, [before, after]]) => [name, before, after]));

/** What an entry of the log says, with texts of users and in English between marks. */
export function logged(entry, of = ROWS) {
  const knobs = changes(entry).map((each) => turned(...each));
  if (knobs.length) return knobs.join(t("; "));
  const { action, detail } = entry;
  if (action === "retried") {
    const { statuses = [], message, limit, rows: chosen } = detail ?? {};
    const which = [statuses.map((each) => STATUSES[each] ?? each).join(t(", ")), message && own(message), chosen && of(chosen), limit && t("at most {rows}", { rows: of(limit) })];
    return t("Run again: {which}", { which: which.filter(Boolean).join(t("; ")) });
  }
  const more = Object.entries(detail ?? {}).filter(([, value]) => value !== null && typeof value !== "object")
    .map(([name, value]) => (Object.hasOwn(DETAILS, name) ? DETAILS[name](value) : own(`${name.replaceAll("_", " ")} ${value}`)));
  return labelled(DONE[action] ?? action, listed(more.filter(Boolean)));
}

/**
 * Why a Task stands still, by the code of the API, whose own words are English and have the numbers and names besides.
 */
export const WAITS = {
  stopped_jobs: t("Only stopped jobs are left; they wait to be started again."),
  children: t("It waits for the Tasks below it."),
  retry: t("It waits for a retry."),
  broker_away: t("The queue server does not answer."),
  no_process: t("No process works its queue."),
  queue_paused: t("Its queue is paused."),
  held: t("A process does not answer."),
  quiet: t("The processes of its queue take no more jobs."),
  start_at: t("Its start is later."),
  interval: t("The next round begins later."),
  rate: t("A rate limit holds it back."),
  put_off: t("Its jobs could not be sent to the queue, and are tried again."),
  unknown_worker: t("No process knows its worker."),
  due_later: t("Its rows are scheduled for later."),
  key: t("Its rows wait for earlier jobs of their key."),
  earlier_list: t("An earlier list with keys is open or still being read; its rows go first."),
  priority: t("Jobs of a smaller priority run first."),
  busy: t("All threads are busy."),
  jobs_of_others: t("Its queue has jobs of other workers."),
  open: t("It is open for more rows."),
  session: t("Waiting for its session."),
  too_many_failures: t("More rows failed than are tolerated."),
  paused: t("It is paused."),
};

/** The rows of the file, and of these the ones that have ended: what was not accepted has. */
export const rowsOfFile = (p) => p.counts.total + p.split.rejected;
export const ended = (p) => p.progress.done + p.split.rejected;

/** How much of the bar is reached, in whole percents; null while nobody knows. Of a list that was rejected it is nothing. */
export function reached(p) {
  if (p.counts.total === 0 || p.progress.percent === null) return p.done ? 0 : p.progress.percent;
  return Math.floor((100 * ended(p)) / rowsOfFile(p));
}

/** Percent and number of rows, where there are any. */
export const amount = (p) => (p.counts.total || !p.done ? t("{percent} of {total}", { percent: percent(p), total: count(rowsOfFile(p)) }) : "");

export const percent = (p) => (p.progress.percent === null ? "–" : percents(reached(p)));

// -- How a request ended without its result ----------------------------------------------------------------------------

/**
 * Numbers are statuses of answers that the API did not write: a proxy's, say. `lost`, `unreadable` and the numbers say what
 * happened, `change_unknown` and `list_unknown` what is to be done where a change may have been made all the same.
 */
export const SAID = {
  401: t("You are not logged in, or not any more: reload the page and log in."),
  403: t("This is forbidden here (status 403): ask whoever runs the server."),
  404: t("There is nothing at this address (status 404): reload the page."),
  408: t("The request came too slowly (status 408). Try again."),
  409: t("The present state does not allow this (status 409): reload the page."),
  413: t("This is over a limit of a proxy in front of the server (status 413): send less, or have the limit raised."),
  421: t("The server does not answer to this host name (status 421): use its own address."),
  422: t("The server does not accept this (status 422): correct it and try again."),
  429: t("There are too many requests (status 429)."),
  500: t("Something went wrong in the server (status 500); its log has it."),
  502: t("The server is away behind its proxy (status 502)."),
  503: t("The server is busy or away (status 503)."),
  504: t("The server did not answer its proxy in time (status 504)."),
  connection_lost: t("Connection lost, retrying…"),
  asks_again: t("This page asks again by itself."),
  lost: t("No answer came from the server."),
  unreadable: t("The answer is not one of AsyncTask (status {status}): a proxy or a login page may stand between. Reload the page."),
  try_again: t("Try again in a moment."),
  try_later: t("Try again in {seconds} s."),
  change_unknown: t("It is not known whether this was done: wait until the page shows the present state again, and look before you repeat it."),
  list_unknown: t("It is not known whether the list was taken. Send it again as it is: it is not taken twice. If this happens again, choose the file anew: it may have changed since, or be over a limit."),
};

export const say = (key, values = {}) => filled(SAID[key], values);

/** What ended a request: the API's own words in `detail`, else those for the status (0: no answer came). */
export function cause(status, detail) {
  // To a program the API says how a token is sent; a person logs in.
  if (detail && status !== 401) return detail;
  return say(status === 0 ? "lost" : status in SAID ? status : "unreadable", { status });
}

/** What is to be done then. `effect`: "change" or "list" if that may have been done all the same; `seconds`: of Retry-After. */
export function advice(status, detail, effect, seconds) {
  const found = effect === "none" ? [] : [say(`${effect}_unknown`)];
  if (seconds !== null) found.push(say("try_later", { seconds }));
  else if (effect === "none" && !detail && (status === 0 || status === 429 || status >= 500)) found.push(say("try_again"));
  return found;
}

/** Sentences one after the other; the API's own end without a full stop. */
export function together(...sentences) {
  const [stop, gap] = language === "en" ? [".", " "] : ["。", ""];
  return sentences.map((each, i) => (i === sentences.length - 1 || /[.!?…。！？]$/.test(each) ? each : each + stop)).join(gap);
}
