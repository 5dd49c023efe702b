"""The shapes of what operations are asked and answer, for the OpenAPI document and the checks of what comes in."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints

from webapi.answers import PageLinks, Time, _Out
from webapi.incoming import Name, _In, _Query

__all__ = [
    "EntryPage",
    "Found",
    "JobPage",
    "JobQuery",
    "Keys",
    "ListQuery",
    "Outcome",
    "PauseState",
    "Processes",
    "Queues",
    "SearchQuery",
    "Signalled",
]

Key = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class ListQuery(_Query):
    """Which page."""

    after: int = Field(0, ge=0, le=9_000, description="Go on after so many entries; `links.next` says it.")
    limit: int = Field(100, ge=1, le=1000, description="Entries on a page.")


class SearchQuery(_Query):
    """What to look for."""

    text: Name = Field(description="What the entry must hold, letter by letter.")
    limit: int = Field(100, ge=1, le=1000, description="Most entries to find.")


class JobQuery(_Query):
    """Which jobs of a queue."""

    after: int = Field(0, ge=0, le=1_000_000, description="Go on after so many jobs; `links.next` says it.")
    limit: int = Field(100, ge=1, le=1000, description="Jobs on a page.")
    newest: bool = Field(False, description="Begin with the last one pushed.")


class Keys(_In):
    """Which entries."""

    keys: list[Key] = Field(min_length=1, max_length=1000, description="Their keys, as the list has them.")


class QueueInfo(_Out):
    """A queue of the broker."""

    name: str
    length: int
    latency_s: float | None = Field(description="Seconds since the job that waits longest was pushed, where it says so.")
    paused: bool
    processes: int = Field(description="Live processes that work it.")
    unattended: bool = Field(description="No live process works it.")
    next_worker: str | None = Field(description="The worker of the next job.")


class Queues(_Out):
    """Every queue in which something waits, or that is paused."""

    queues: list[QueueInfo]


class QueuedJob(_Out):
    """A job in a queue."""

    key: str
    tracked: bool
    job_id: str
    task_id: int | None
    worker: str | None
    priority: int
    args: JsonValue
    args_cut: bool = Field(description="They are too long to be shown.")
    enqueued_at: Time | None
    raw: str | None = Field(description="The beginning of what is no job.")


class JobPage(_Out):
    """Jobs of a queue."""

    jobs: list[QueuedJob]
    total: int
    links: PageLinks


class WaitingEntry(_Out):
    """A job that waits for a retry or its time, or that is dead."""

    key: str
    tracked: bool
    job_id: str
    task_id: int | None
    row: int | None
    worker: str | None
    queue: str | None
    at: Time | None = Field(description="When it is due, or died.")
    retries: int
    args: JsonValue
    args_cut: bool = Field(description="They are too long to be shown.")
    error: str | None
    error_class: str | None
    created_at: Time | None
    raw: str | None = Field(description="The beginning of what is no job.")


class EntryPage(_Out):
    """A page of a list."""

    entries: list[WaitingEntry]
    total: int
    links: PageLinks


class Found(_Out):
    """What a search found."""

    entries: list[WaitingEntry]
    complete: bool = Field(description="False where there may be more.")


class Skipped(_Out):
    """One to which it was not done."""

    key: str
    reason: str


class Outcome(_Out):
    """What came of an action."""

    done: int
    skipped: list[Skipped] = Field(description="At most 100.")


class PauseState(_Out):
    """A queue after it was paused or unpaused."""

    queue: str
    paused: bool
    changed: bool


class ProcessInfo(_Out):
    """A process."""

    identity: str
    kind: str = Field(description="worker, web, an engine's name; sidekiq: of another program.")
    hostname: str | None
    pid: int | None
    concurrency: int
    busy: int
    rss: int | None = Field(description="Bytes.")
    quiet: bool
    alive: bool
    queues: list[str]
    started_at: Time | None
    beat_at: Time | None


class Processes(_Out):
    """What runs."""

    processes: list[ProcessInfo]


class Signalled(_Out):
    """What a process was told."""

    identity: str
    signal: str
