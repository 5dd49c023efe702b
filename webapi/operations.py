"""The routes of what waits and runs, and of what people do about it; liveness, readiness and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from flask import Response
from pydantic import Field, StringConstraints

from asynctask.brokers.admin import MAX_OFFSET, MAX_PAGE
from asynctask.errors import BrokerUnavailable, NotFound, SchemaOutdated, Unavailable
from asynctask.figures import DURATIONS_S, MOST_WORKERS, OTHERS, SIZES
from asynctask.ledger.history import By, History, Step
from asynctask.ledger.history import read as read_history
from asynctask.ledger.queries import SCANNED
from asynctask.ledger.rates import RateInfo
from asynctask.ledger.schedules import ScheduleInfo
from asynctask.logs import get_logger
from asynctask.operations import (
    ACTIONS,
    FAILING,
    LISTS,
    MAX_TARGET_S,
    MAX_WINDOW,
    MIN_TARGET_S,
    TARGET_S,
    Action,
    FailureTemplates,
    JobList,
    Operations,
    ProcessInfo,
    QueuedJob,
    QueueInfo,
    WaitingEntry,
)
from webapi.context import JsonPage, asynctask_app, json_response, page_links, who
from webapi.problems import problem_response, public_message
from webapi.shapes import TEXT, Health, Moment, Name, PageLinks, Routes, Submitted, _In, _Query, described, rows_of
from webapi.tasks import answer

if TYPE_CHECKING:
    from prometheus_client import Metric

_log: Final = get_logger("asynctask.web")

# -- schemas of requests and responses

Key = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class ListQuery(_Query):
    """Which page."""

    after: int = Field(0, ge=0, le=MAX_WINDOW - MAX_PAGE, description="Entries to skip; follow `links.next`.")
    limit: int = Field(100, ge=1, le=MAX_PAGE, description="Entries on a page.")


class SearchQuery(_Query):
    """The search text."""

    text: Name = Field(description="Text that the entry contains (case-sensitive).")
    limit: int = Field(100, ge=1, le=MAX_PAGE, description="Most entries to find.")


class JobQuery(_Query):
    """Which jobs of a queue."""

    after: int = Field(0, ge=0, le=MAX_OFFSET, description="Jobs to skip; follow `links.next`.")
    limit: int = Field(100, ge=1, le=MAX_PAGE, description="Jobs on a page.")
    newest: bool = Field(False, description="Begin with the last one pushed.")


class TargetQuery(_Query):
    """The target time of `workers_wanted`."""

    target_s: float = Field(
        TARGET_S,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
        description="Seconds within which `workers_wanted` would finish what waits.",
    )


class QueuesQuery(TargetQuery):
    """Which queues, and for which target time."""

    queue: Name | None = Field(None, description="Only this one, even if it is empty.")


class HistoryQuery(_Query):
    """Which part of the history."""

    since: Moment | None = Field(None, description="Its beginning; default: an hour before its end.")
    until: Moment | None = Field(None, description="Its end; default: now.")
    step: Step | None = Field(None, description="Of a point; default: the shortest with at most 500 points.")
    queue: Name | None = Field(None, description="Only this queue.")
    worker: Name | None = Field(None, description="Only this worker.")
    by: By | None = Field(None, description="A series for each queue or worker; default: one for all.")


class FirstQuery(_Query):
    """How many jobs of a template."""

    first: int | None = Field(None, ge=1, le=SCANNED, description="At most so many, of the newest Tasks; default: all.")


class Keys(_In):
    """Which entries."""

    keys: list[Key] = Field(min_length=1, max_length=1000, description="Their keys, as the list has them.")


class ScheduleChange(_In):
    """What to change of a schedule."""

    enabled: bool = Field(description="Whether it ticks.")


class RateChange(_In):
    """What to change of a rate limit."""

    rate: Annotated[str, StringConstraints(max_length=32)] = Field(
        description="Starts in a time, such as 5/s, 300/min, 1000/h or 0.5/s."
    )


Queues: Final = rows_of("Queues", "queues", described(QueueInfo))
JobPage: Final = rows_of("JobPage", "jobs", described(QueuedJob), total=int, links=PageLinks)
EntryPage: Final = rows_of("EntryPage", "entries", described(WaitingEntry), total=int, links=PageLinks)
Found: Final = rows_of(
    "Found",
    "entries",
    described(WaitingEntry),
    complete=Annotated[bool, Field(description="False where there may be more.")],
)
Templates: Final = described(FailureTemplates)
Processes: Final = rows_of("Processes", "processes", described(ProcessInfo))
Schedule: Final = described(ScheduleInfo)
Schedules: Final = rows_of("Schedules", "schedules", Schedule)
Rate: Final = described(RateInfo)
Rates: Final = rows_of("Rates", "rates", Rate)


# -- routes

blueprint: Final = Routes("operations", __name__, url_prefix="/api", tag="Operations")

_MAX_NAME: Final = 255


def _operations() -> Operations:
    return asynctask_app().operations


def _uncached(value: Any) -> Response:
    return json_response(value, cache="no-cache")


def _known(name: str) -> str:
    """The name of a queue or a process in a path. Raises :class:`NotFound` for one that none can have."""
    if len(name) > _MAX_NAME or "\0" in name:
        raise NotFound("there is nothing of such a name")
    return name


@blueprint.serve("GET /queues", "listQueues", Queues, query=QueuesQuery)
def queues(query: QueuesQuery) -> Response:
    """The queues, how much waits in each and for how long, and how many workers are wanted

    `unattended` marks one that no live process works; `jobs_of_others` counts jobs whose workers its processes lack.
    """
    return _uncached({"queues": _operations().queues(target_s=query.target_s, only=query.queue)})


@blueprint.serve("GET /queues/<name>/jobs", "listQueueJobs", JobPage, query=JobQuery)
def queue_jobs(name: str, query: JobQuery) -> Response:
    """The jobs of a queue, those next to run first

    A page ends early, after at least one job, at about 8 MB.
    """
    found = _operations().jobs(_known(name), after=query.after, limit=query.limit, newest=query.newest, take=JsonPage())
    return _uncached({"jobs": found["jobs"], "total": found["total"], "links": page_links(found["next"])})


@blueprint.serve("GET /processes", "listProcesses", Processes)
def processes() -> Response:
    """The running processes; with Redis also those of Sidekiq"""
    return _uncached({"processes": _operations().processes()})


@blueprint.serve("GET /history", "getHistory", described(History), query=HistoryQuery)
def history(query: HistoryQuery) -> Response:
    """What ended in each step of a span, with the run times, and what waited

    The span is extended to whole steps. What the processes have counted since their last heartbeats is not in it yet.
    """
    return _uncached(read_history(asynctask_app().ledger, **dict(query)))


_LAST_PAGE: Final = 9_000


def _serve_list(name: str, its: JobList) -> None:
    @blueprint.serve(
        f"GET /{name}",
        f"list{name.capitalize()}",
        EntryPage,
        query=ListQuery,
        endpoint=name,
        summary=f"The {its.jobs}",
        more=f"{its.first.capitalize()} first; those of the ledger and untracked ones in Redis. A page ends early at about"
        " 8 MB.",
    )
    def page(query: ListQuery) -> Response:
        found = _operations().listed(name, after=query.after, limit=query.limit, take=JsonPage())
        following = found["next"] if found["next"] is not None and found["next"] <= _LAST_PAGE else None
        return _uncached({"entries": found["entries"], "total": found["total"], "links": page_links(following)})

    @blueprint.serve(
        f"GET /{name}/search",
        f"search{name.capitalize()}",
        Found,
        query=SearchQuery,
        endpoint=f"{name}_search",
        summary=f"Find {its.jobs}",
        more="Those that contain a text (case-sensitive), among the first 100,000, up to about 8 MB.",
    )
    def search(query: SearchQuery) -> Response:
        return _uncached(_operations().search(name, query.text, limit=query.limit, take=JsonPage()))


for _name, _its in LISTS.items():
    _serve_list(_name, _its)


def _serve_templates(name: str, its: JobList) -> None:
    @blueprint.serve(
        f"GET /{name}/templates",
        f"list{name.capitalize()}Templates",
        Templates,
        endpoint=f"{name}_templates",
        summary=f"The templates of the errors of the {its.jobs}",
        more="Across Tasks: how many jobs, of which Tasks, and when. Looks at no more than 10,000 rows of the newest 1,000"
        " Tasks that have some, 10,000 jobs without a Task and 10,000 in Redis; `complete` is false if there may be more.",
    )
    def templates() -> Response:
        return _uncached(_operations().templates(name))

    for action in ACTIONS:
        if action.on == name:
            _serve_template_action(name, its, action)


def _serve_template_action(name: str, its: JobList, action: Action) -> None:
    @blueprint.serve(
        f"POST /{name}/templates/<template>/{action.name}",
        f"{action.name}{name.capitalize()}OfTemplate",
        described(action.answer),
        query=FirstQuery,
        endpoint=f"{name}_template_{action.name}",
        summary=action.title.format(f"{its.jobs}, of one template"),
        more=action.more,
        responses=[404],
    )
    def act(template: str, query: FirstQuery) -> Response:
        done = _operations().act_on_template(name, action.name, template, first=query.first, who=who())
        return json_response(done.as_dict())


for _name in FAILING:
    _serve_templates(_name, LISTS[_name])


_NAMED: Final = {
    "queues": ("/queues/<name>", "Queue"),
    "processes": ("/processes/<name>", "Process"),
    "jobs": ("/jobs/<job:job_id>", "Job"),
}
"""Of what is named in a path: the path, and the word of it in the ids of operations."""


def _serve(action: Action, *, takes_keys: bool = False) -> None:
    """The route of an action: with ``takes_keys`` the one for the jobs that its body names."""
    path, word = _NAMED.get(action.on, (f"/{action.on}", action.on.capitalize()))
    name, some = action.name, ""
    if action.on in LISTS:
        some = LISTS[action.on].jobs if takes_keys else f"all {LISTS[action.on].jobs}"
        name = action.name if takes_keys else f"{action.name}-all"
    elif takes_keys:
        word = f"{word}Jobs"

    @blueprint.serve(
        f"POST {path}/{name}",
        f"all{action.name.capitalize()}{word}" if name != action.name else f"{name}{word}",
        described(action.answer),
        body=Keys if takes_keys else None,
        responses=[] if some and not takes_keys else [409],
        endpoint=f"{action.on}_{name}",
        summary=action.title.format(some),
        more=action.more,
        tags=["Workers" if action.on == "jobs" else "Operations"],
    )
    def act(body: Keys | None = None, name: str = "", job_id: str = "") -> Response:
        of = job_id or _known(name) or action.on
        return json_response(action.call(_operations(), of, None if body is None else body.keys, who()))


for _action in ACTIONS:
    if _action.takes_keys:
        _serve(_action, takes_keys=True)
    if not _action.takes_keys or _action.on in LISTS:
        _serve(_action)


# -- schedules


@blueprint.serve("GET /schedules", "listSchedules", Schedules)
def schedules() -> Response:
    """The schedules of periodic tasks, with their next ticks"""
    return _uncached({"schedules": asynctask_app().schedules.all()})


@blueprint.serve(
    "POST /schedules/<name>/run",
    "runSchedule",
    Submitted,
    status=202,
    description="Accepted: the Task",
    responses=[409],
)
def run_schedule(name: str) -> Response:
    """Submit a Task of a schedule now

    Its next tick stays. Refused while a Task of it is open, unless its Tasks may overlap, and where this application does
    not declare it.
    """
    return answer(asynctask_app().schedules.run(_known(name), who=who()))


@blueprint.serve("PATCH /schedules/<name>", "changeSchedule", Schedule, body=ScheduleChange)
def change_schedule(name: str, body: ScheduleChange) -> Response:
    """Switch a schedule on or off

    Ticks while it is off are not made up for.
    """
    found = asynctask_app().schedules
    found.switch(_known(name), body.enabled)
    return json_response(found.find(name))


# -- rate limits


@blueprint.serve("GET /rates", "listRates", Rates)
def rates() -> Response:
    """The rate limits of workers"""
    return _uncached({"rates": asynctask_app().rates.all()})


@blueprint.serve("PATCH /rates/<name>", "changeRate", Rate, body=RateChange)
def change_rate(name: str, body: RateChange) -> Response:
    """Set the rate of a limit

    It holds at once in all processes, until the code declares another rate than it does now.
    """
    return json_response(asynctask_app().rates.set(_known(name), body.rate))


# -- health

health: Final = Routes("health", __name__, tag="Health")


@health.serve("GET /healthz", "healthz", Health)
def healthz() -> Response:
    """The process lives"""
    return json_response({"status": "ok"}, cache="no-store")


@health.serve("GET /readyz", "readyz", Health)
def readyz() -> Response:
    """The database answers, its schema is current, and submissions can be stored"""
    try:
        asynctask_app().ensure_schema()
        asynctask_app().tasks(limit=1)
        asynctask_app().check_ready()
    except (SchemaOutdated, Unavailable) as error:
        code = "unavailable" if isinstance(error, BrokerUnavailable) else error.code
        _log.error("not_ready", error=str(error))
        return problem_response(503, public_message(error), code=code, headers={"Retry-After": "2"})
    return json_response({"status": "ok"}, cache="no-store")


# -- metrics

METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"


@health.serve("GET /metrics", "metrics", TEXT, query=TargetQuery, media="text/plain")
def metrics(query: TargetQuery) -> Response:
    """The backlog, the Tasks and the processes, for Prometheus

    What a process did is as of its last heartbeat, with its identity as the label `process`.
    """
    from prometheus_client import CollectorRegistry, generate_latest  # only a server that is scraped needs it

    found = asynctask_app().operations.monitored(target_s=query.target_s)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(found))
    response = Response(generate_latest(registry), content_type=METRICS)
    response.headers["Cache-Control"] = "no-store"
    return response


class _Collector:
    """The metrics of one scrape. ``found``: as :meth:`Operations.monitored` returns it."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric, with a sample for each of its labels."""
        yield from _of_queues(self._found["queues"])
        tasks = [((state,), count) for state, count in sorted(self._found["tasks"].items())]
        yield _metric("Gauge", "tasks", "Tasks that are not over.", ["state"], tasks)
        about = "Dead jobs that nobody has dismissed, counted up to 100,000 in the ledger."
        yield _metric("Gauge", "dead_jobs", about, [], [((), self._found["dead"])])
        yield from _of_processes(self._found["processes"])
        figures = {each["identity"]: each["figures"] for each in self._found["processes"]}
        yield from _of_work({identity: its for identity, its in figures.items() if isinstance(its, dict)})


_Samples = Iterable[tuple[tuple[str, ...], Any]]


def _metric(kind: str, name: str, about: str, labels: Sequence[str], samples: _Samples) -> Metric:
    from prometheus_client import core

    family = getattr(core, f"{kind}MetricFamily")(f"asynctask_{name}", about, labels=labels)
    for values, value in samples:
        family.add_metric(values, *value) if kind == "Histogram" else family.add_metric(values, value)
    return cast("Metric", family)


def _buckets(bounds: Sequence[float], samples: _Samples) -> _Samples:
    """Samples of a histogram, given as of :meth:`asynctask.figures.Histogram.as_list`; those of another version's buckets
    are left out."""
    limits = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    for values, (total, counts) in samples:
        if len(counts) == len(limits):
            yield values, (list(zip(limits, accumulate(counts), strict=True)), total)


def _of_queues(queues: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    known: set[str] = set()
    parts: Counter[tuple[str, ...]] = Counter()
    for queue in queues:
        for part in queue["backlog"]:
            worker = part["worker"] or ""
            if worker not in known and len(known) >= MOST_WORKERS:
                worker = OTHERS
            known.add(worker)
            parts[queue["name"], worker, "" if part["priority"] is None else str(part["priority"])] += part["waiting"]
    about = "Jobs that could start now; no worker: jobs without a Task in a foreign queue."
    yield _metric("Gauge", "backlog_jobs", about, ["queue", "worker", "priority"], parts.items())
    for name, member, about in (
        ("queue_waiting_jobs", "waiting", "Jobs that could start now, in the ledger and in a foreign queue."),
        ("queue_oldest_seconds", "oldest_s", "Seconds since the first of these could start; 0: nothing waits."),
        ("queue_jobs_per_second", "rate_per_s", "Jobs that the live processes of the queue finish in a second."),
        ("queue_workers_wanted", "workers_wanted", "Worker processes that would finish what waits in target_s seconds."),
        ("queue_broker_jobs", "length", "Jobs in a foreign queue, or untracked ones in the ledger."),
        ("queue_processes", "processes", "Live processes that work the queue."),
    ):
        yield _metric("Gauge", name, about, ["queue"], [((queue["name"],), queue[member] or 0) for queue in queues])


def _of_processes(processes: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    kinds = Counter((each["kind"],) for each in processes if each["alive"])
    yield _metric("Gauge", "processes", "Processes with a valid lease.", ["kind"], sorted(kinds.items()))
    for name, member, about in (
        ("process_lease_age_seconds", "lease_age_s", "Seconds since the process renewed its lease itself."),
        (
            "process_held_seconds",
            "held_s",
            "Seconds for which the process has not answered, while it exists; 0: it answers.",
        ),
        ("process_threads", "concurrency", "Jobs that the process can run at once."),
        ("process_busy_threads", "busy", "Jobs that the process runs."),
        ("process_memory_bytes", "rss", "The most memory that the process has used."),
    ):
        samples = [((each["identity"], each["kind"]), each[member]) for each in processes if each[member] is not None]
        yield _metric("Gauge", name, about, ["process", "kind"], samples)


def _of_work(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """The metrics of the processes' work, from the figures of their heartbeats."""
    outcomes = [
        ((identity, worker, status), count)
        for identity, its in figures.items()
        for worker, counts in its.get("outcomes", {}).items()
        for status, count in counts.items()
    ]
    about = "Attempts of tracked jobs that ended."
    yield _metric("Counter", "outcomes", about, ["process", "worker", "status"], outcomes)
    durations = [
        ((identity, worker), its["durations"][worker])
        for identity, its in figures.items()
        for worker in its.get("durations", ())
    ]
    about = "How long attempts of tracked jobs ran."
    yield _metric("Histogram", "job_duration_seconds", about, ["process", "worker"], _buckets(DURATIONS_S, durations))
    for kind, name, member, about in (
        ("Histogram", "flush_outcomes", "flushes", "Outcomes committed in one transaction."),
        ("Histogram", "claim_jobs", "claims", "Jobs that one borrow, or one exchange with the broker, brought."),
        ("Counter", "dispatch_rounds", "rounds", "Passes of the dispatcher."),
        ("Counter", "dispatched_jobs", "dispatched", "Jobs that the dispatcher pushed to foreign queues."),
    ):
        samples: _Samples = [((identity,), its[member]) for identity, its in figures.items() if member in its]
        yield _metric(kind, name, about, ["process"], _buckets(SIZES, samples) if kind == "Histogram" else samples)
