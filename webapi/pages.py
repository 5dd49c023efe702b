"""The pages: the overview, a new list, each Task, and the operator's console: jobs, failures, queues, workers and
schedules. ``webapi/static`` fetches what changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from apiflask import APIBlueprint
from flask import Response, current_app, g, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue
from werkzeug.datastructures import Authorization

from asynctask._version import __version__
from asynctask.access import User
from asynctask.clock import SECOND
from asynctask.errors import NotFound, SchemaOutdated, TooLarge, Unavailable
from asynctask.ledger.search import MAX_TEXT
from asynctask.lists.readers.encodings import OFFERED
from asynctask.lists.readers.opening import FORMATS
from asynctask.operations import FAILING, LISTS
from asynctask.worker import WEBHOOK
from webapi import access, caching, openapi, texts, workers
from webapi.context import TASK_PAGES, asynctask_app, find_progress, reader_locale, set_language, tag
from webapi.problems import problem_response
from webapi.reading import SIGN_IN_BYTES, current_request
from webapi.security import LOGINS, SESSION, SESSION_S, TooManyAttempts, session_cookie

blueprint: Final = APIBlueprint("pages", __name__, enable_openapi=False)


class Entry(NamedTuple):
    """An entry of the navigation. ``pages``: the endpoints that it marks as current; the first is its target. ``number``:
    how many there are, if that is shown."""

    name: str
    pages: tuple[str, ...]
    number: int = 0

    def text(self, translate: Callable[..., str]) -> str:
        """Its name in the reader's language, with the number if there is one."""
        name = translate(self.name)
        return f"{name} ({self.number:,})" if self.number else name

    @property
    def key(self) -> str:
        """The key that leads there after ``g``; of two entries with the same one it is the first's."""
        return self.name[0].lower()


NAVIGATION: Final = (
    Entry("Tasks", ("pages.home", "pages.new", "pages.task")),
    Entry("Jobs", ("pages.jobs", "pages.job")),
    Entry("Failures", ("pages.failures",)),
    Entry("Queues", ("pages.queues",)),
    Entry("Workers", ("pages.workers_page",)),
    Entry("Schedules", ("pages.schedules",)),
    Entry("API", ("pages.docs",)),
)


def _entries(user: User) -> list[Entry]:
    """The entries whose pages the user may see, the failures with their number."""
    shown = [] if user.task_id is not None else [each for each in NAVIGATION if access.may_see(user, each.pages[0])]
    return [each._replace(number=_dead()) if each.pages[0] == "pages.failures" else each for each in shown]


def _dead() -> int:
    """How many jobs are dead; 0 if nobody can say, because a page is shown without the database, too."""
    try:
        return asynctask_app().operations.dead()
    except (Unavailable, SchemaOutdated):
        return 0


THEMES: Final = ("light", "dark")
THEME: Final = "asynctask_theme"
"""The cookie with the theme that the reader has chosen; frame.js sets it."""

SEARCH: Final = "pages.search"

TABS: Final = {"retries": "Failing now", "dead": "Dead", "scheduled": "Scheduled"}
"""The lists of jobs, as the page of failures names them."""


@blueprint.app_context_processor
def _of_reader() -> dict[str, Any]:
    """What each page depends on: the language of the reader's messages, the theme, and what the reader may do."""
    language = tag(reader_locale())
    user, theme, is_known = access.current_user(), request.cookies.get(THEME), g.get("is_known", False)
    searches = is_known and SEARCH in current_app.view_functions and access.may_see(user, SEARCH)
    return {
        "locale": language,
        "_": texts.translator(language),
        "of_server": texts.of_server(asynctask_app().config.locale, reader_locale()),
        "themes": THEMES,
        "theme": theme if theme in THEMES else None,
        "search_url": url_for(SEARCH) if searches else None,
        "user_name": user.name if "user" in g and user.task_id is None else None,
        "may_submit": user.may("submit"),
        "may_control": user.may("control"),
        "may_operate": user.may("operate"),
        "sees_all": user.sees_all,
        "may_list": is_known and user.task_id is None,
        "navigation": _entries(user) if is_known else [],
        "takes_tokens": current_app.extensions[LOGINS].takes_tokens,
        "may_sign_out": g.get("has_session", False),
    }


@blueprint.after_request
def _say_language(response: Response) -> Response:
    if response.mimetype == "text/html":
        set_language(response, reader_locale())
    return response


@blueprint.errorhandler(NotFound)
def missing(_: Exception) -> ResponseReturnValue:
    """The page of a Task or a job that does not exist, or not for the reader."""
    named = request.view_args or {}
    if "job_id" in named:
        kind, name, every = "job", named["job_id"][:64], url_for("pages.jobs")
    else:
        kind, name, every = "Task", named.get("task_id"), url_for("pages.home")
    return render_template("missing.html", kind=kind, name=name, all_url=every), 404


_FIGURES: Final = (
    ("running", "Running", "pages.workers_page"),
    ("waiting", "Waiting", "pages.queues"),
    ("rate", "Rows per second", "pages.queues"),
    ("failures", "Failures in the last hour", "pages.failures"),
    ("workers", "Live workers", "pages.workers_page"),
)
"""The figures of the overview: name, label, and the page that explains it."""


class Tab(NamedTuple):
    """A group of Tasks on the overview, and its address with the same filters."""

    name: str
    group: str | None
    url: str


_TABS: Final = {None: "All", "running": "Running", "attention": "Needs attention", "finished": "Finished"}
_WITHIN: Final = {
    "hour": "in the last hour",
    "day": "in the last day",
    "week": "in the last week",
    "month": "in the last month",
}


@blueprint.get("/")
def home() -> ResponseReturnValue:
    """What happens now, and the Tasks."""
    filters = {name: request.args.get(name, "")[:255] for name in ("worker", "owner", "within")}
    worker, owner, within = (value or None for value in filters.values())
    tabs = [
        Tab(name, group, url_for("pages.home", group=group, worker=worker, owner=owner, within=within))
        for group, name in _TABS.items()
    ]
    shown = next((tab for tab in tabs if tab.group == request.args.get("group")), tabs[0])
    named = sorted(asynctask_app().workers)
    return render_template(
        "home.html", figures=_FIGURES, tabs=tabs, shown=shown, filters=filters, within=_WITHIN, workers=named
    )


@blueprint.get("/new")
def new() -> ResponseReturnValue:
    """A new list: its file, the fields of its columns, its check and its start."""
    app = asynctask_app()
    suffixes = [suffix for each in FORMATS.values() for suffix in each.suffixes]
    takes_lists = app.list_workers()
    return render_template(
        "new.html",
        workers=[each for each in workers.registered(app) if each["name"] in takes_lists],
        max_file_bytes=app.config.max_file_bytes,
        formats=list(FORMATS),
        suffixes=suffixes,
        encodings=OFFERED,
    )


@blueprint.get(f"{TASK_PAGES}/<int:task_id>")
def task(task_id: int) -> ResponseReturnValue:
    """One Task."""
    progress = find_progress(task_id)
    worker = progress["worker"]
    app = asynctask_app()
    known = app.workers.get(worker)
    return render_template(
        "task.html",
        task_id=task_id,
        title=progress["title"],
        worker=worker,
        takes_lists=worker in app.list_workers(),
        shards=known is not None and bool(known.columns),
    )


@blueprint.get("/jobs")
def jobs() -> ResponseReturnValue:
    """The jobs without a Task."""
    return render_template("jobs.html", workers=sorted(asynctask_app().workers))


@blueprint.get("/jobs/<job:job_id>")
def job(job_id: str) -> ResponseReturnValue:
    """One job."""
    return render_template("job.html", job_id=job_id, worker=asynctask_app().event(job_id)["worker_name"])


@blueprint.get("/search")
def search() -> ResponseReturnValue:
    """What happened to an item."""
    searched = {name: worker.search for name, worker in asynctask_app().workers.items() if worker.search}
    return render_template(
        "search.html",
        **{name: request.args.get(name, "")[:MAX_TEXT] for name in ("q", "field", "worker")},
        workers=sorted(searched),
        fields=sorted(set().union(*searched.values())),
        longest=MAX_TEXT,
    )


@blueprint.get("/failures")
def failures() -> ResponseReturnValue:
    """What waits for a retry, is dead or scheduled, of all Tasks; the first two by the templates of their errors."""
    name = request.args.get("list")
    if name not in LISTS:
        name = "dead" if _dead() else "retries"
    return render_template("failures.html", lists=TABS, current=name, failing=name in FAILING)


@blueprint.get("/queues")
def queues() -> ResponseReturnValue:
    """What waits in each queue, who works it, and the jobs of one."""
    return render_template("queues.html")


@blueprint.get("/workers")
def workers_page() -> ResponseReturnValue:
    """The processes with their threads, and the registered workers."""
    return render_template("workers.html", workers=workers.registered(asynctask_app()))


@blueprint.get("/schedules")
def schedules() -> ResponseReturnValue:
    """The schedules of periodic tasks, and the deliveries of webhooks."""
    config = asynctask_app().config
    # The rest of the URL may be a secret.
    everywhere = urlsplit(config.webhook_url).hostname if config.webhook_url else None
    return render_template("schedules.html", webhook_host=everywhere, may_send=bool(config.webhook_secret), webhook=WEBHOOK)


# -- sessions


def _is_path(text: str) -> bool:
    """Whether a text is a path of this server, and of no other: browsers take a backslash for a slash, and drop tabs."""
    return text.startswith(f"{request.script_root}/") and text[1:2] not in ("/", "\\") and text.isprintable()


def _said(text: str, **values: Any) -> str:
    return texts.translator(tag(reader_locale()))(text, **values)


def _ask_for_token(wrong: str = "", after: str = "", status: int = 200, **headers: str) -> ResponseReturnValue:
    return render_template("login.html", wrong=wrong, after=after), status, headers


@blueprint.get("/login")
def login() -> ResponseReturnValue:
    """The form that takes a token."""
    _refuse_without_tokens()
    return _ask_for_token()


def _refuse_without_tokens() -> None:
    if not current_app.extensions[LOGINS].takes_tokens:
        raise NotFound("this server takes no tokens")


@blueprint.post("/login")
def sign_in() -> ResponseReturnValue:
    """Exchanges a token for a session, and leads to the page that was asked for."""
    _refuse_without_tokens()
    incoming, logins = current_request(), current_app.extensions[LOGINS]
    if (incoming.content_length or 0) > SIGN_IN_BYTES:
        raise TooLarge(f"the form is over the limit of {SIGN_IN_BYTES:,} bytes; send a token alone")
    incoming.load_form()
    secret, after = incoming.form.get("token", "").strip(), incoming.form.get("after", "")
    try:
        user = logins.user_of(Authorization("bearer", token=secret), request.remote_addr or "", request.path)
    except TooManyAttempts as error:
        wait = dict(error.headers)["Retry-After"]
        wrong = _said("Too many wrong tokens came from this address. Try again in {seconds} s.", seconds=wait)
        return _ask_for_token(wrong, after, error.status, **{"Retry-After": wait})
    if user is None:
        wrong = _said("This token is not known.") if secret else _said("A token is needed.")
        return _ask_for_token(wrong, after, 401, **{"WWW-Authenticate": "Bearer"})
    response = redirect(after if _is_path(after) else url_for("pages.home"), 303)
    ends_at = asynctask_app().clock.now() // SECOND + SESSION_S
    response.headers.add("Set-Cookie", session_cookie(logins.session(secret, ends_at), SESSION_S))
    return response


@blueprint.post("/logout")
def sign_out() -> ResponseReturnValue:
    """Ends the session of the browser."""
    current_app.extensions[LOGINS].end_session(request.cookies.get(SESSION, ""))
    response = redirect(url_for("pages.login"), 303)
    response.headers.add("Set-Cookie", session_cookie("", 0))
    return response


@blueprint.get("/docs")
def docs() -> ResponseReturnValue:
    """The OpenAPI document, for people; without anything from other sites."""
    spec, has_tokens = openapi.document(), current_app.extensions[LOGINS].takes_tokens
    groups: dict[str, list[dict[str, Any]]] = {tag["name"]: [] for tag in spec["tags"]}
    for path, operations in sorted(spec["paths"].items()):
        for method, operation in operations.items():
            place = request.script_root + path
            example = openapi.curl(request.host_url.rstrip("/") + place, method, operation, token=has_tokens)
            shown = {"path": place, "method": method, "example": example, **operation}
            groups[operation["tags"][0]].append(shown)
    url = url_for("openapi.spec")
    return render_template("docs.html", spec=spec, groups=groups, common=openapi.COMMON_RESPONSES, spec_url=url)


CLIENT: Final = Path(__file__).parent / "static" / "client" / "asynctask.js"
_FOR_EVERY_PAGE: Final = {"Access-Control-Allow-Origin": "*", "Cross-Origin-Resource-Policy": "cross-origin"}


@blueprint.get("/client/<version>/asynctask.js")
def client(version: str) -> ResponseReturnValue:
    """The module for frontends, to be kept for a year. Another version leads to the one of this server, so that pages which
    name an earlier one go on after an upgrade."""
    here = url_for("pages.client", version=__version__)
    if version != __version__:
        if version.partition(".")[0] != __version__.partition(".")[0]:
            detail = f"this server has another version of asynctask.js: load {here}"
            return problem_response(404, detail, code="not_found", headers=_FOR_EVERY_PAGE)
        led = redirect(here)
        led.headers.update(_FOR_EVERY_PAGE)
        led.headers["Cache-Control"] = "public, max-age=300"
        return led
    response = Response(CLIENT.read_bytes(), mimetype="text/javascript", headers=_FOR_EVERY_PAGE)
    response.headers["Cache-Control"] = caching.FOREVER
    return response
