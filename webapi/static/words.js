// Numbers, times and states as people say them.

const numbers = new Intl.NumberFormat();
const rates = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

export const count = (n) => numbers.format(n);
/** What the items of a Task are to people: [one, several]. */
export const ROWS = ["row", "rows"];
/** Of an export. */
export const SHARDS = ["shard", "shards"];
export const rows = (n, [one, several] = ROWS) => `${count(n)} ${n === 1 ? one : several}`;
/** A number of things: "1 job", "1,200 jobs". */
export const things = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
export const rate = (n) => rates.format(n);
/** Memory: "120 MB". */
export const bytes = (n) => `${numbers.format(Math.round(n / 1_000_000))} MB`;

/** A number of rows with its verb: "1 row was", "2 rows were". */
const rowsThat = (n, one, many, of = ROWS) => `${rows(n, of)} ${n === 1 ? one : many}`;

/** Seconds as "about 3 min". */
export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${rates.format(seconds / 3600)} h`;
  return `${rates.format(seconds / 86400)} days`;
}

/** What ended in the last hour, for those who do not see its chart. */
export function endedInHour({ finish, failed, error }) {
  const ended = `${rowsThat(finish + failed + error, "has", "have")} ended in the last hour`;
  return error ? `${ended}, ${count(error)} of them with an error` : ended;
}

export const when = (text) => (text ? new Date(text).toLocaleString() : "–");

const days = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });
const MONTH_S = 30 * 86400;

/** A time as people say it: "3 min ago", "in 20 s"; from a month on, the day. */
export function ago(text) {
  const seconds = (Date.now() - new Date(text)) / 1000;
  if (Math.abs(seconds) >= MONTH_S) return days.format(new Date(text));
  if (seconds < -5) return `in ${duration(-seconds)}`;
  return seconds < 5 ? "just now" : `${duration(seconds)} ago`;
}

/** The time zone of all times shown: "Europe/Berlin (GMT+2)". */
export function zone() {
  const parts = new Intl.DateTimeFormat("en", { timeZoneName: "shortOffset" }).formatToParts(new Date());
  const { timeZone } = Intl.DateTimeFormat().resolvedOptions();
  const offset = parts.find(({ type }) => type === "timeZoneName").value;
  return timeZone === offset ? offset : `${timeZone} (${offset})`;
}

export const STATES = {
  splitting: "reading", running: "running", paused: "paused", finalizing: "closing", finished: "finished",
  cancelled: "cancelled", rejected: "not accepted",
};

/** Of a single job. */
export const STATUSES = {
  enqueue: "waiting", working: "running", stopped: "stopped", finish: "succeeded", failed: "refused", error: "error",
  cancelled: "cancelled",
};

/** Why a tick of a schedule has no Task. */
export const SKIPPED = {
  missed: "because no process ran", overlap: "because the Task before was open", empty: "because there was no item",
  refused: "because the items were refused",
};

/** What a list would become, of the result of its check. */
export function acceptance({ accepted, rejected }) {
  if (rejected === 0) return accepted === 1 ? "Its only row will be accepted." : `All ${rows(accepted)} will be accepted.`;
  if (accepted === 0) return rejected === 1 ? "Its only row is not accepted." : `None of its ${rows(rejected)} is accepted.`;
  return `${rows(accepted)} will be accepted, ${count(rejected)} not.`;
}

export const KINDS = { failed: "refused", error: "error" };

export const CALLBACKS = { on_complete: "Called at the end", on_success: "Called if all succeed", on_failure: "Called if any does not" };
export const CALLED = {
  enqueue: "waiting", working: "running", stopped: "stopped", finish: "done", failed: "refused", error: "error", cancelled: "cancelled",
};

export const COUNTS = [
  ["finish", "succeeded"], ["failed", "refused"], ["error", "errors"], ["cancelled", "cancelled"],
  ["working", "running"], ["enqueue", "waiting"], ["stopped", "stopped"],
];

const unsuccessful = (c) => c.failed + c.error;

/** The word and the colour of a Task. What ended without a success, or not whole, does not look like one that succeeded. */
export function badge(p) {
  const bad = unsuccessful(p.counts);
  if (p.state !== "finished" || bad + p.split.rejected === 0) return [STATES[p.state] ?? p.state, p.state];
  if (bad > 0 && p.counts.finish === 0) return ["nothing succeeded", "error"];
  return [bad > 0 ? "finished with failures" : "finished in part", "partial"];
}

/** What a Task does now, in a sentence. `of`: what its items are, ROWS or SHARDS. */
export function sentence(p, of = ROWS) {
  const { counts: c } = p;
  const broken = p.split.state === "failed" ? ` The list could not be read to its end: ${why(p)}` : "";
  const waits = p.retrying ? ` ${rowsThat(p.retrying, "waits", "wait", of)} for another try${retriedFor(p)}.` : "";
  switch (p.state) {
    case "splitting": return p.split.state === "open" ? `Open: ${rows(c.total, of)} so far, and more may be added.${waits}` : `Reading the list: ${rows(c.total, of)} so far.${waits}`;
    case "running": return running(p, of) + waits + broken;
    case "paused": return paused(p, of);
    case "finalizing": return of === SHARDS ? "Every shard is done; the file is put together." : "Every row is done; what is to follow is under way.";
    case "finished": return finished(p, of) + broken;
    case "cancelled": return p.done ? `Cancelled: ${rowsThat(c.cancelled, "was", "were", of)} not run.${lost(p)}` : "Being cancelled: nothing new is started.";
    case "rejected": return rejected(p);
    default: return p.state;
  }
}

/** What a group of failures says: what they have in common, or the message of a single one. */
export const saidBy = (group) => (group.count === 1 ? group.message : group.template);

/** The error for which most of the rows wait. */
function retriedFor(p) {
  const [first] = p.retrying_errors ?? [];
  if (!first) return "";
  const said = saidBy(first);
  return `: ${said.length > 120 ? `${said.slice(0, 119)}…` : said}`;
}

function running(p, of) {
  if (p.state_reason === "waiting_for_session") return "Waiting for its session.";
  if (p.state_reason === "waiting_for_children") return of === SHARDS ? "Its shards have ended; it waits for the Tasks below it." : "Its rows have ended; it waits for the Tasks below it.";
  if (p.state_reason === "stopped_jobs") return "Only stopped jobs are left; they wait to be started again.";
  if (p.counts.working + p.control.in_flight === 0 && p.started_at === null) return "Waiting for a worker to begin.";
  return "Running.";
}

function paused(p, of) {
  if (p.state_reason === "parent_paused") return "Paused with the Task above it, and resumed with it.";
  if (p.state_reason !== "too_many_failures") return "Paused: nothing new is started until you resume it.";
  const { tolerated_failures: tolerated } = p.control;
  return `Paused by itself: more ${of[1]} failed than are tolerated (${tolerated}). Raise that, or retry the failed ${of[1]}, and it goes on.`;
}

function finished(p, of) {
  const bad = unsuccessful(p.counts);
  const rejected = p.split.rejected ? ` ${rowsThat(p.split.rejected, "was", "were")} not accepted.` : "";
  if (bad === 0) return `Finished: ${of === SHARDS ? "every shard succeeded" : "every row that was accepted succeeded"}.${rejected}${lost(p)}`;
  const which = bad === p.counts.total && bad > 1 ? `none of ${rows(bad, of)} succeeded` : `${rows(bad, of)} of ${count(p.counts.total)} did not succeed`;
  return `Finished: ${which}.${rejected}${lost(p)}`;
}

const lost = (p) => (p.state_reason === "callback_failed" ? " What should have followed it failed." : "");

/** The words of the reason, which the API gives after its code. */
const why = ({ split }) => (split.reason ?? "").replace(/^[a-z_]+: /, "");

/** Why a list was refused. What is wrong with its rows stands below. */
function rejected(p) {
  const { split } = p;
  if (split.reason) return `Not accepted: ${why(p)}`;
  if (split.rejected === 0) return "Not accepted: the list has no rows.";
  if (p.state_reason === "rows_rejected") return `Not accepted as a whole: ${rowsThat(split.rejected, "is", "are")} not in order.`;
  return split.rejected === 1 ? "Not accepted: its only row is not in order." : `Not accepted: none of its ${rows(split.rejected)} is in order.`;
}

/** Rate and time left, or "" where nothing is known. */
export function pace(p) {
  if (p.done) return p.started_at && p.finished_at ? `took ${duration((new Date(p.finished_at) - new Date(p.started_at)) / 1000)}` : "";
  const parts = [];
  if (p.progress.rate_per_s) parts.push(`${rates.format(p.progress.rate_per_s)} rows/s`);
  if (p.progress.eta_s && !["paused", "finalizing"].includes(p.state)) parts.push(p.progress.eta_s < 1 ? "less than a second left" : `about ${duration(p.progress.eta_s)} left`);
  return parts.join(", ");
}

/** What the state does not say by itself: why a Task waits, was not accepted, or is not whole. */
export function remark(p) {
  const said = sentence(p);
  const isPlain = said === "Running." || (p.state === "finished" && p.state_reason === null && p.split.state !== "failed");
  return isPlain ? "" : said;
}

/** The rows that are not as they should be, by kind: what did not succeed, was not accepted, and has been mended since. */
export function problems(p) {
  const { failed, error } = p.counts;
  return [
    ["failed", failed, `${count(failed)} refused`],
    ["error", error, error === 1 ? "1 error" : `${count(error)} errors`],
    ["rejected", p.split.rejected, `${count(p.split.rejected)} not accepted`],
    ["mended", p.mended, `${count(p.mended)} mended`],
  ].filter(([, number]) => number > 0).map(([kind, , text]) => [kind, text]);
}

/** The parts of the bar, out of all rows of the file: what has ended, by outcome, what was not accepted, and what runs. */
export function segments(p) {
  // While the list is read its rows are only partly there.
  const expected = p.split.state === "splitting" ? (p.split.planned ?? 0) : 0;
  const all = Math.max(p.counts.total + p.split.rejected, expected, 1);
  const numbers = { ...p.counts, rejected: p.split.rejected };
  return ["finish", "failed", "error", "cancelled", "rejected", "working"].map((kind) => [kind, numbers[kind] / all]);
}

/** How many rows are to be corrected or run still once a Task is done; those that were mended since are not. */
export const left = ({ counts: c, split, mended }) => Math.max(0, c.failed + c.error + c.cancelled + split.rejected - mended);

/** The heading and the text of what is to be done next; the text may be empty. */
export function nextStep(p, of = ROWS) {
  if (!p.done) return ["Files", ""];
  const n = left(p);
  const mended = p.mended ? `${rowsThat(p.mended, "was", "were", of)} mended since.` : "";
  if (n === 0 && p.counts.total + p.split.rejected > 0) return ["Nothing is left to do", mended || (of === SHARDS ? "Every shard succeeded." : "Every row succeeded.")];
  if (n === 0 || p.state_reason === "rows_rejected" || of === SHARDS) return ["Files", mended];
  if (p.state === "cancelled" && n === p.counts.cancelled) return [`${rows(n)} left: run them, or download them`, mended];
  return [`${rows(n)} left: download, correct, upload`, mended];
}

/** The statuses that the table of rows can be limited to: [statuses of the API, word]. */
export const FILTERS = [
  ["", "all"], ["failed,error", "did not succeed"], ["finish", "succeeded"], ["failed", "refused"], ["error", "errors"],
  ["cancelled", "cancelled"], ["working", "running"], ["enqueue", "waiting"], ["stopped", "stopped"],
];

// -- The log of a Task -------------------------------------------------------------------------------------------------

export const KNOBS = {
  parallel: "Jobs at once", interval: "Seconds from round to round", priority: "Priority",
  tolerated_failures: "Pause after more failures than", title: "Title", start_at: "Starts at",
};

const DONE = {
  paused: "Paused", resumed: "Resumed", cancelled: "Cancelled", sealed: "Sealed", added: "Rows added", linked: "A link was made",
  closed: "Every row has ended", finished: "Finished", "split sealed": "The list was read", "split open": "Open for more rows",
  "split failed": "The list could not be read to its end", "split cancelled": "The reading of the list was ended",
  "callbacks retried": "What follows runs again", called_back: "What follows is done", callback_failed: "What should have followed failed", "jobs retried": "Jobs run again", "jobs restarted": "Jobs started",
  "jobs cancelled": "Jobs cancelled", "jobs killed": "Jobs given up", "jobs stopped": "Jobs stopped", "jobs dismissed": "Jobs dismissed",
};

const knobValue = (value) => (value === null || value === "" ? "none" : String(value));

/** The knobs that an entry of the log changed: [name, old value, new value]. */
export const changes = ({ action, detail }) => (action !== "changed" || detail === null ? [] :
  Object.entries(detail).filter(([name, pair]) => name in KNOBS && Array.isArray(pair)).map(([name, [before, after]]) => [name, before, after]));

/** What an entry of the log says. */
export function logged(entry, of = ROWS) {
  const turned = changes(entry).map(([name, before, after]) => `${KNOBS[name]}: ${knobValue(before)} → ${knobValue(after)}`);
  if (turned.length) return turned.join("; ");
  const { action, detail } = entry;
  if (action === "retried") {
    const { statuses = [], message, limit, rows: chosen } = detail ?? {};
    const which = [statuses.map((each) => STATUSES[each] ?? each).join(", "), message, chosen && rows(chosen, of), limit && `at most ${rows(limit, of)}`];
    return `Run again: ${which.filter(Boolean).join("; ")}`;
  }
  const more = Object.entries(detail ?? {}).filter(([, value]) => value !== null && typeof value !== "object").map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
  return [DONE[action] ?? action, more.join(", ")].filter(Boolean).join(": ");
}

/** How much of the bar is reached, for readers of screens; null while nobody knows. Of a list that was rejected it is nothing. */
export const reached = (p) => (p.done ? (p.progress.percent ?? 0) : p.progress.percent);

/** Percent and number of rows, where there are any. */
export const amount = (p) => (p.counts.total || !p.done ? `${percent(p)} of ${count(p.counts.total)}` : "");

export const percent = (p) => (p.progress.percent === null ? "–" : `${Math.floor(p.progress.percent)} %`);

// -- How a request ended without its result ----------------------------------------------------------------------------

/**
 * By language, those of the API's texts. Numbers are statuses of answers that the API did not write: a proxy's, say. `lost`,
 * `unreadable` and the numbers say what happened, `change_unknown` and `list_unknown` what is to be done where a change may have
 * been made all the same.
 */
export const SAID = {
  en: {
    connection_lost: "Connection lost, retrying…",
    asks_again: "This page asks again by itself.",
    lost: "No answer came from the server.",
    unreadable: "The answer is not one of AsyncTask (status {status}): a proxy or a login page may stand between. Reload the page.",
    try_again: "Try again in a moment.",
    try_later: "Try again in {seconds} s.",
    change_unknown: "It is not known whether this was done: wait until the page shows the present state again, and look before you repeat it.",
    list_unknown: "It is not known whether the list was taken. Send it again as it is: it is not taken twice. If this happens again, choose the file anew: it may have changed since, or be over a limit.",
    401: "You are not logged in, or not any more: reload the page and log in.",
    403: "This is forbidden here (status 403): ask whoever runs the server.",
    404: "There is nothing at this address (status 404): reload the page.",
    408: "The request came too slowly (status 408). Try again.",
    409: "The present state does not allow this (status 409): reload the page.",
    413: "This is over a limit of a proxy in front of the server (status 413): send less, or have the limit raised.",
    421: "The server does not answer to this host name (status 421): use its own address.",
    422: "The server does not accept this (status 422): correct it and try again.",
    429: "There are too many requests (status 429).",
    500: "Something went wrong in the server (status 500); its log has it.",
    502: "The server is away behind its proxy (status 502).",
    503: "The server is busy or away (status 503).",
    504: "The server did not answer its proxy in time (status 504).",
  },
  "zh-CN": {
    connection_lost: "连接已断开，正在重试…",
    asks_again: "本页会自动重试。",
    lost: "服务器没有应答。",
    unreadable: "收到的不是 AsyncTask 的应答（状态 {status}）：中间可能有代理或登录页。请重新加载本页。",
    try_again: "请稍后再试。",
    try_later: "请在 {seconds} 秒后再试。",
    change_unknown: "无法确定操作是否已执行：请等本页重新显示当前状态，确认后再决定是否重复操作。",
    list_unknown: "无法确定列表是否已被接收。请原样再次发送：不会重复接收。如果再次出现，请重新选择文件：它可能已被修改，或超出了限制。",
    401: "您尚未登录或登录已失效：请重新加载本页并登录。",
    403: "此处不允许该操作（状态 403）：请联系服务器的管理员。",
    404: "该地址没有内容（状态 404）：请重新加载本页。",
    408: "请求发送得太慢（状态 408）。请再试一次。",
    409: "当前状态不允许该操作（状态 409）：请重新加载本页。",
    413: "超出了服务器前代理的限制（状态 413）：请减少内容，或请管理员提高限制。",
    421: "服务器不接受此主机名（状态 421）：请使用它自己的地址。",
    422: "服务器不接受此内容（状态 422）：请更正后再试。",
    429: "请求过多（状态 429）。",
    500: "服务器内部出错（状态 500），其日志中有记录。",
    502: "代理无法连接到服务器（状态 502）。",
    503: "服务器繁忙或不可用（状态 503）。",
    504: "服务器没有及时应答代理（状态 504）。",
  },
  ja: {
    connection_lost: "接続が切れました。再試行しています…",
    asks_again: "このページは自動的に再試行します。",
    lost: "サーバーから応答がありません。",
    unreadable: "AsyncTask の応答ではありません（ステータス {status}）。間にプロキシかログイン画面がある可能性があります。ページを再読み込みしてください。",
    try_again: "しばらくしてからもう一度お試しください。",
    try_later: "{seconds} 秒後にもう一度お試しください。",
    change_unknown: "実行されたかどうか分かりません。ページが現在の状態を再び表示するまで待ち、確認してからやり直してください。",
    list_unknown: "リストが受け付けられたかどうか分かりません。そのままもう一度送信してください。二重には受け付けられません。繰り返し起きる場合は、ファイルを選び直してください。変更されたか、上限を超えている可能性があります。",
    401: "ログインしていないか、ログインが無効になりました。ページを再読み込みしてログインしてください。",
    403: "この操作は許可されていません（ステータス 403）。サーバーの管理者に問い合わせてください。",
    404: "このアドレスには何もありません（ステータス 404）。ページを再読み込みしてください。",
    408: "リクエストの送信が遅すぎました（ステータス 408）。もう一度お試しください。",
    409: "現在の状態ではこの操作はできません（ステータス 409）。ページを再読み込みしてください。",
    413: "サーバーの前にあるプロキシの上限を超えています（ステータス 413）。量を減らすか、上限の引き上げを依頼してください。",
    421: "サーバーはこのホスト名に応答しません（ステータス 421）。サーバー本来のアドレスを使ってください。",
    422: "サーバーはこの内容を受け付けません（ステータス 422）。修正してもう一度お試しください。",
    429: "リクエストが多すぎます（ステータス 429）。",
    500: "サーバー内部でエラーが発生しました（ステータス 500）。サーバーのログに記録されています。",
    502: "プロキシがサーバーに接続できません（ステータス 502）。",
    503: "サーバーが混雑しているか、停止しています（ステータス 503）。",
    504: "サーバーが時間内にプロキシに応答しませんでした（ステータス 504）。",
  },
};

/** The reader's language, as the server chose it for its own texts. */
export const tongue = () => (document.body.dataset.locale in SAID ? document.body.dataset.locale : "en");

export const say = (key, values = {}) => SAID[tongue()][key].replace(/\{(\w+)\}/g, (_, name) => String(values[name]));

/** What ended a request: the API's own words in `detail`, else those for the status (0: no answer came). */
export function cause(status, detail) {
  // To a program the API says how a token is sent; a person logs in.
  if (detail && status !== 401) return detail;
  return say(status === 0 ? "lost" : status in SAID.en ? status : "unreadable", { status });
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
  const [stop, gap] = tongue() === "en" ? [".", " "] : ["。", ""];
  return sentences.map((each, i) => (i === sentences.length - 1 || /[.!?…。！？]$/.test(each) ? each : each + stop)).join(gap);
}
