"""What the user of a request may do: one decision for every route, made before its view is called."""

from __future__ import annotations

from typing import Final

from apiflask import APIFlask
from flask import g, request

from asynctask.access import RIGHTS, User
from asynctask.clock import SECOND
from asynctask.errors import InputError, NotFound
from asynctask.lists.options import SubmitOptions
from asynctask.lists.rows import refused_option
from asynctask.operations import ACTIONS
from asynctask.task import VERBS
from webapi.context import asynctask_app, find_progress

_ANYBODY: Final = User("anybody", rights=RIGHTS.keys())
"""The user of a server without a login."""


class Forbidden(InputError):
    """The user lacks the right for the request."""

    code = "forbidden"
    status = 403


class ReadOnly(Forbidden):
    """The user only reads."""

    code = "read_only"


SUBMITS: Final = frozenset(
    {
        "tasks.create", "tasks.add", "tasks.seal", "lists.preview", "lists.marked", "exports.export", "workers.create_job",
        "pages.new",
    }
)  # fmt: skip
CONTROLS: Final = frozenset(
    {
        "tasks.update",
        "tasks.link",
        *(f"tasks.{name}" for name in VERBS),
        *(f"operations.jobs_{a.name}" for a in ACTIONS if a.on == "jobs"),
    }
)
OWN: Final = frozenset(
    {
        "tasks.index",
        "tasks.create",
        "lists.preview",
        "lists.marked",
        "exports.export",
        "pages.home",
        "pages.new",
        "pages.search",
        "workers.search",
    }
)
"""Endpoints without a Task or a job in their path that answer a user of one owner, with the Tasks of that owner."""

PUBLIC: Final = frozenset(
    {
        "static", "openapi.spec", "pages.docs", "pages.client", "pages.login", "pages.sign_in", "pages.sign_out",
        "health.healthz", "health.readyz", "workers.index", "workers.template_as_xlsx", "workers.template_as_csv",
    }
)  # fmt: skip
"""Endpoints that show nothing of any Task."""


def right_for(endpoint: str, method: str) -> str:
    """The right that a request needs. A new route needs ``operate``, unless it only reads or a table above has it."""
    if endpoint in SUBMITS:
        return "submit"
    if endpoint in CONTROLS:
        return "control"
    return "read" if method in ("GET", "HEAD", "OPTIONS") else "operate"


def may_see(user: User, endpoint: str) -> bool:
    """Whether a user may see a page that names no Task and no job."""
    return endpoint in PUBLIC or (user.may("read") and (user.sees_all or (user.task_id is None and endpoint in OWN)))


def current_user() -> User:
    """Who sends the request."""
    found = g.get("user", _ANYBODY)
    assert isinstance(found, User)
    return found


STREAM_S: Final = 300.0
"""Seconds that a stream lasts at most. Its client connects again and is admitted again: its login may have ended."""


def stream_lasts_s() -> float:
    """Seconds after which a stream ends that the request opens: with its link, and after :data:`STREAM_S` or up to a fifth
    less, so that the clients that a restart has connected at once do not come back at once each time."""
    app, ends_at = asynctask_app(), g.get("link_ends_at")
    most = STREAM_S * (1 - app.ids.random() / 5)
    return most if ends_at is None else min(most, ends_at - app.clock.now() / SECOND)


def register(flask_app: APIFlask) -> None:
    """Makes ``flask_app`` refuse what its user may not do. Call it after the user is known."""
    flask_app.before_request(_admit)


def _admit() -> None:
    """Raises :class:`Forbidden` (403) for a missing right, whatever the request names, and :class:`NotFound` (404) for a
    Task of another owner, as if there was none."""
    if (endpoint := request.endpoint) is None:  # there is no such route
        return
    user, right = current_user(), right_for(endpoint, request.method)
    if endpoint not in PUBLIC and not user.may(right):
        raise _lacks(user, right)
    if user.sees_all:
        return
    named = request.view_args or {}
    if "task_id" in named:
        _refuse_unseen(user, named["task_id"])
    elif "job_id" in named:
        _refuse_unseen_job(user, named["job_id"])
    elif user.task_id is not None:
        raise Forbidden(f"this link opens Task {user.task_id} only")
    elif endpoint not in OWN | PUBLIC:
        raise Forbidden(
            "this belongs to no owner, and you may use only what belongs to yours"
            + (": submit a list of one item instead" if endpoint == "workers.create_job" else "")
        )


def _lacks(user: User, right: str) -> Forbidden:
    if user.rights == {"read"}:
        return ReadOnly(f"{user.name} may only read")
    return Forbidden(f"{user.name} lacks the right {right}, to {RIGHTS[right]}")


def _refuse_unseen(user: User, task_id: int) -> None:
    if not user.sees(task_id, find_progress(task_id)["owner"]):
        raise NotFound(f"there is no Task {task_id}")


def _refuse_unseen_job(user: User, job_id: str) -> None:
    """A job is its Task's, a callback the Task's that it follows; any other has no owner."""
    event = asynctask_app().event(job_id)
    task_id = event["task_id"] or event["callback_of"]
    if task_id is None or not user.sees(task_id, find_progress(task_id)["owner"]):
        raise NotFound(f"there is no job {job_id[:64]!r}")


def of_user(options: SubmitOptions) -> SubmitOptions:
    """The options of a submission, with the owner of a user that has one. Raises :class:`InputError` (422) for another
    owner, and for the correction or a parent that does not exist for the user."""
    user = current_user()
    if user.owner is None:
        return options
    if options.owner not in (None, user.owner):
        raise refused_option("owner", "option.owner", {"owner": user.owner}, options.owner)
    for name, text in (("resubmit_of", "option.resubmit_task"), ("parent", "option.parent")):
        if task_id := getattr(options, name):
            try:
                _refuse_unseen(user, task_id)
            except NotFound:
                raise refused_option(name, text, {"task": task_id}, task_id) from None
    return options.model_copy(update={"owner": user.owner})
