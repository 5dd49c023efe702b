"""``demo``: the whole system on SQLite, with a real sheet and real processes, and an audit of the outcome.

With ``--engine`` the jobs run on Celery, Dramatiq or RQ: a private Redis, and the engine's own worker command.
"""

from __future__ import annotations

import csv
import hashlib
import http.client
import importlib.util
import json
import os
import posixpath
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from xml.etree import ElementTree

import click

from asynctask.cli.options import Command, Session, environment, examples_folder, load_file, pass_session, variables
from asynctask.cli.output import FAILURES, OK, Bars, Output, count, number, summary
from asynctask.cli.serve import address, child_argv, free_port, served_at, warn_if_open
from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX, socket_path
from asynctask.errors import AsyncTaskError, ConfigError, InputError, Unavailable, not_installed

_MARK: Final = ".asynctask-demo"
_SHOP: Final = "PROMOTIONS_DATABASE_URL"
_PRODUCTS: Final = 200
_EXPORTED: Final = (50_000, 20)
"""Rows of the price list that is exported, and its shards."""

_EXPORTED_ON_ENGINE: Final = (10_000, 4)
"""The same on an engine: RQ starts a process for each shard."""

_ROWS: Final[Mapping[str | None, int]] = {"rq": 1_000}  # RQ starts a process for each job
_START_S: Final = 60.0
_STALLED_S: Final = 120.0
_RESERVED: Final = frozenset({"database_url", "broker_url", "data_dir", "results_url", "app"})
_OF_OWN_WORKERS: Final = frozenset({"concurrency", "processes", "queues", "strict_queues"})

_BROKER: Final = "PROMOTIONS_BROKER"
_ENGINE_SHUTDOWN_S: Final = 10.0
_RQ_WORKER: Final = "asynctask.integrations.rq.TrackedWorker"
ENGINES: Final[Mapping[str, Sequence[str]]] = {
    "celery": ("celery", "-A", "celery_promotions:celery", "worker", "-P", "threads", "-c", "8"),
    "dramatiq": ("dramatiq", "dramatiq_promotions:broker", "-p", "2", "-t", "4"),
    "rq": ("rq.cli", "worker-pool", "-n", "4", "-c", "rq_promotions", "-S", "json", "-w", _RQ_WORKER, "default"),
}
"""The engines that the demo can run on, and the worker command of each, as ``python -m`` takes it. The modules are those of
``examples/engines``."""


@dataclass(frozen=True)
class Followed:
    """A Task that was followed over HTTP to its end: its last progress, and the seconds since it was sent."""

    progress: dict[str, Any]
    seconds: float

    @property
    def rate(self) -> float:
        return float(self.rows / self.seconds)

    @property
    def rows(self) -> int:
        """Of a list, or of the file of an export."""
        if (result := self.progress["result"]) is not None:
            return int(result["rows"])
        return int(self.progress["counts"]["total"] + self.progress["split"]["rejected"])


@click.command("demo", cls=Command)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-data"),
    show_default=True,
    help="Folder of the demo, emptied each time.",
)
@click.option("--rows", type=click.IntRange(100, 100_000), help="Rows of the sheet.  [default: 10,000; on rq 1,000]")
@click.option("--engine", type=click.Choice(list(ENGINES)), help="Run the jobs on this engine, on a Redis of its own.")
@click.option("--keep", is_flag=True, help="Leave it running at the end, until Ctrl-C.")
@pass_session
def demo(session: Session, folder: Path, rows: int | None, engine: str | None, keep: bool) -> int:
    """Run the whole system on an example shop.

    It submits 200 products as JSON and 10,000 campaigns as a spreadsheet, exports 50,000 rows of a price list, follows all
    three, fetches the report of the rows that did not succeed and the exported file, and audits the outcome against the
    shop's own data: exit code 1 if they differ.

    With --engine the engine's own worker command performs the jobs, and 10,000 rows are exported; redis-server must be
    installed.
    """
    _check_flags(session.flags, engine)
    with ExitStack() as stack:
        stack.enter_context(_term_as_interrupt())
        folder = stack.enter_context(_empty_folder(folder))
        run = _Run(session, folder, rows or _ROWS.get(engine, 10_000), _EXPORTED_ON_ENGINE if engine else _EXPORTED)
        stack.enter_context(environment(run.settings, session.environ))
        stack.enter_context(variables({_SHOP: f"sqlite:///{folder / 'promotions.db'}"}, session.environ))
        stack.enter_context(run.services() if engine is None else run.services_on(engine))
        found = run.perform()
        session.out.document({**found, "engine": engine, "url": run.url if keep else None})
        run.print_outcome(found, keep)
        if keep:
            _until_interrupt()
    return OK if found["ok"] else FAILURES


def _check_flags(flags: Collection[str], engine: str | None) -> None:
    own = _RESERVED.intersection(flags)
    if own:
        raise click.UsageError(f"--{sorted(own)[0].replace('_', '-')} cannot be set: the demo chooses it")
    if engine is None:
        return
    if useless := _OF_OWN_WORKERS.intersection(flags):
        flag = sorted(useless)[0].replace("_", "-")
        raise click.UsageError(f"--{flag} is a setting of AsyncTask's own workers: with --engine, leave it out")
    if importlib.util.find_spec(engine) is None:
        raise ConfigError(not_installed(engine, engine))


class _Run:
    def __init__(self, session: Session, folder: Path, rows: int, exported: tuple[int, int]) -> None:
        config, _ = session.config()
        self.out: Output = session.out
        self._environ = session.environ
        self._folder, self._rows, (self._prices, self._shards) = folder, rows, exported
        self._clock, self._pause = SystemClock(), threading.Event()
        self._host = config.host
        if socket_path(config.host):
            raise ConfigError(f"the demo's page needs an address: leave out host {config.host!r}, or give 127.0.0.1")
        port = free_port(config.host, session.flags.get("port", 0))
        warn_if_open(config.host, port, has_tokens=False)
        self.url = address(config.host, port)
        self._api = Api(self.url)
        self.settings = {
            **session.flags,
            "tokens": "",  # the demo's own requests have none
            "database_url": f"sqlite:///{folder / 'asynctask.db'}",
            "data_dir": str(folder / "asynctask-data"),
            "port": port,
            "processes": session.flags.get("processes", 1),
        }
        self.report = folder / "report.xlsx"
        self._sheet = folder / "campaigns.xlsx"
        self._exported = folder / "price-list.csv"
        self._examples = examples_folder()
        self._shop_file = self._examples / "promotions.py"
        self._untidy = load_file(self._examples / "untidy_sheet.py")

    @contextmanager
    def services(self) -> Iterator[None]:
        """The web server and the workers, ready to use; the end of the block stops them."""
        with self._running(child_argv(f"{self._shop_file}:app", "up", {}), {}):
            yield

    @contextmanager
    def services_on(self, engine: str) -> Iterator[None]:
        """A Redis, the web server and the workers of an engine, in the same way. Raises :class:`ConfigError` where there is
        no redis-server."""
        from asynctask.runtime.supervisor import ChildSpec, supervising
        from asynctask.testing.servers import MissingServer, RedisServer

        module, command = f"{engine}_promotions", ENGINES[engine]
        web = child_argv(f"{module}:app", "web", {"host": self._host, "port": self.settings["port"]})
        children = [ChildSpec("web", web), ChildSpec("worker", [sys.executable, "-m", *command])]
        argv, environ = supervising(["demo", engine], children, shutdown_s=_ENGINE_SHUTDOWN_S)
        examples = [str(self._examples / "engines"), str(self._examples)]
        path = os.pathsep.join([*examples, *filter(None, [self._environ.get("PYTHONPATH")])])
        with ExitStack() as stack:
            try:
                redis = stack.enter_context(RedisServer(self._folder))
            except MissingServer as error:
                raise ConfigError(f"--engine {engine} needs a Redis: {error}") from None
            environ |= {_BROKER: redis.url, "RQ_REDIS_URL": redis.url, "PYTHONPATH": path}
            self.out.line(f"On {engine}: {' '.join([command[0].partition('.')[0], *command[1:]])}")
            stack.enter_context(self._running(argv, environ, redis.lifeline))
            yield

    @contextmanager
    def _running(self, argv: Sequence[str], environ: Mapping[str, str], *passed: int) -> Iterator[None]:
        """A supervisor, until the end of the block; ``passed``: descriptors that it holds while it lives."""
        from asynctask.runtime.supervisor import LIFELINE

        log = self._folder / "services.log"
        theirs, ours = os.pipe()  # closed by the kernel however this process dies, which stops the services
        try:
            with log.open("wb") as sink:
                up = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=(theirs, *passed),
                    start_new_session=True,
                    cwd=self._folder if environ else None,
                    env={**self._child_environment(), **environ, LIFELINE: str(theirs)},
                )
            try:
                self._wait_until_ready(up, log)
                yield
            finally:
                _stop(up)
        finally:
            os.close(theirs)
            os.close(ours)

    def _child_environment(self) -> dict[str, str]:
        """This environment without settings meant for another application."""
        keep = {ENV_PREFIX + name.upper() for name in self.settings}
        return {k: v for k, v in self._environ.items() if not k.startswith(ENV_PREFIX) or k in keep}

    def _wait_until_ready(self, up: subprocess.Popen[bytes], log: Path) -> None:
        until = self._clock.monotonic() + _START_S
        while True:
            try:
                self._api.get("/readyz")
                return
            except Unavailable:
                if up.poll() is not None or self._clock.monotonic() > until:
                    last = log.read_text("utf-8", "replace").strip().splitlines()[-3:]
                    raise Unavailable(f"the demo's services did not start; {log} ends with: {' / '.join(last)}") from None
                self._pause.wait(0.05)

    def perform(self) -> dict[str, Any]:
        """Sends both lists, follows them, fetches the report and audits everything. Returns the command's document."""
        self.out.line(f"Writing a sheet of {count(self._rows, 'row')}, as untidy as people's are: {self._sheet}")
        expected = self._untidy.write_sheet(self._sheet, self._rows)
        shop = load_file(self._shop_file)
        products = shop.products(_PRODUCTS)
        self.out.line(f"Sending {number(len(products))} products as JSON and the sheet as a form, to {self.url}\n")
        body = {"worker": "enroll_product", "items": products, "title": "Products"}
        sent = {self._task_id(self._api.post_json("/api/tasks", body).json()): self._clock.monotonic()}
        fields = {"worker": "create_campaign", "title": self._sheet.name}
        sent[self._task_id(self._api.post_file("/api/tasks", self._sheet, fields).json())] = self._clock.monotonic()
        shop.stock_price_list(self._prices)
        self.out.line(f"Exporting the price list, {number(self._prices)} rows in {self._shards} shards\n")
        shards = shop.price_list_shards(self._shards)
        body = {"worker": "export_price_list", "shards": shards, "title": "Price list"}
        sent[self._task_id(self._api.post_json("/api/exports", body).json())] = self._clock.monotonic()
        followed = self._follow(sent)
        enrolled, created, exported = followed
        task_id = created.progress["task_id"]
        report = self._fetch_report(task_id)
        findings = [
            *audit_products(enrolled.progress, products, shop.planned_refusals(_PRODUCTS), shop.enrolled_skus()),
            *audit_campaigns(
                created.progress,
                sheet_codes(self._sheet, self._untidy.HEADER_ROW),
                report,
                shop.campaign_codes(),
                expected,
            ),
        ]
        self._exported.write_bytes(self._api.get(f"/api/tasks/{exported.progress['task_id']}/result").body)
        findings += audit_export(exported.progress, self._exported, *shop.price_list_sum())
        shop.shop.close()
        ids = [each.progress["task_id"] for each in followed]
        errors = {i: list(self._api.get(f"/api/tasks/{i}/errors").json()["errors"]) for i in ids}
        errors[task_id] += [
            {"message": error, "status": "rejected", "count": count} for error, count in report.rejections.items()
        ]
        return {
            **_document(followed, errors, findings, self._retried(enrolled.progress["task_id"]), self.report),
            "exported": str(self._exported),
        }

    def _task_id(self, progress: Mapping[str, Any]) -> int:
        return int(progress["task_id"])

    def _follow(self, sent: Mapping[int, float]) -> list[Followed]:
        """Polls the Tasks until all are done, as a frontend does: with the ETag of the last answer."""
        tags: dict[int, str] = {}
        seen: dict[int, dict[str, Any]] = {}
        done: dict[int, Followed] = {}
        until = self._clock.monotonic() + _STALLED_S
        with Bars(self.out, self._clock.monotonic) as bars:
            while len(done) < len(sent):
                for task_id in sent.keys() - done.keys():
                    answer = self._api.get(f"/api/tasks/{task_id}", If_None_Match=tags.get(task_id, ""))
                    if answer.status != 304:
                        tags[task_id], seen[task_id] = answer.headers.get("etag", ""), answer.json()
                        until = self._clock.monotonic() + _STALLED_S
                    bars.show(seen[task_id])
                    if seen[task_id]["done"]:
                        done[task_id] = Followed(seen[task_id], self._clock.monotonic() - sent[task_id])
                if self._clock.monotonic() > until:
                    raise Unavailable(f"nothing has moved for {_STALLED_S:g} s; {self._folder}/services.log may say why")
                self._pause.wait(0.1)
        return [done[task_id] for task_id in sorted(done)]

    def _fetch_report(self, task_id: int) -> ReportRows:
        """The report of all rows that did not succeed, rejected ones included."""
        answer = self._api.get(f"/api/tasks/{task_id}/report.xlsx?rows=failed")
        self.report.write_bytes(answer.body)
        return read_report(self.report)

    def _retried(self, task_id: int) -> int:
        """The number of rows with more than one attempt."""
        events = self._api.get(f"/api/tasks/{task_id}/events?limit={_PRODUCTS}").json()["events"]
        return sum(event["attempt"] > 1 for event in events)

    def print_outcome(self, found: Mapping[str, Any], keep: bool) -> None:
        out = self.out
        out.line()
        for each in found["tasks"]:
            rate = f"{each['rows_per_s']:,.0f} rows/s"
            out.line(f"{each['title']}: {count(each['rows'], 'row')} in {each['seconds']:.1f} s ({rate})", style="bold")
            out.line(f"  {summary(each['progress']).plain}")
        out.line(f"  {found['retried']} products were retried after the inventory service had not answered")
        out.line()
        groups = [(each["title"], error) for each in found["tasks"] for error in each["errors"]]
        rows = [(number(error["count"]), error["status"], title, error["message"]) for title, error in groups]
        out.table(("count", "status", "of", "message"), rows, longest=90)
        out.line()
        for each in found["audit"]:
            out.line(f"{'ok   ' if each['holds'] else 'WRONG'} {each['claim']}", style="green" if each["holds"] else "red")
            for sentence in each["contradictions"]:
                out.line(f"      {sentence}", style="red")
        out.line()
        out.line(f"Report: {found['report']}")
        out.line(f"Export: {found['exported']}")
        if keep:
            out.line(f"Page:   {served_at(self._host, self.settings['port'])} (Ctrl-C stops it)")
        else:
            out.line(f"Page:   {self.url} (stopped now; `--keep` leaves it running)")


def _document(
    followed: Sequence[Followed],
    errors: Mapping[int, list[dict[str, Any]]],
    findings: list[Finding],
    retried: int,
    report: Path,
) -> dict[str, Any]:
    tasks = [
        {
            "task_id": each.progress["task_id"],
            "title": each.progress["title"],
            "rows": each.rows,
            "seconds": round(each.seconds, 3),
            "rows_per_s": round(each.rate, 1),
            "errors": errors[each.progress["task_id"]],
            "progress": each.progress,
        }
        for each in followed
    ]
    audit = [{"claim": f.claim, "holds": f.holds, "contradictions": list(f.contradictions)} for f in findings]
    return {
        "ok": all(finding.holds for finding in findings),
        "tasks": tasks,
        "retried": retried,
        "audit": audit,
        "report": str(report),
    }


@contextmanager
def _empty_folder(folder: Path) -> Iterator[Path]:
    """The demo's folder, emptied and locked. Deletes only files of an earlier demo. Raises ConfigError."""
    folder = folder.resolve()
    mark = folder / _MARK
    if folder.exists() and not mark.is_file() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not the demo's and not empty: name another folder with --dir")
    folder.mkdir(parents=True, exist_ok=True)
    with mark.open("a") as lock:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except OSError:
            raise ConfigError(f"a demo is running in {folder}: stop it, or name another folder with --dir") from None
        for each in folder.iterdir():
            if each != mark:
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        yield folder


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """Makes TERM end the demo as Ctrl-C does, with every process stopped."""

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _until_interrupt() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass


def _stop(up: subprocess.Popen[bytes]) -> None:
    """Stops the services as Ctrl-C would; kills their process group after 30 s."""
    try:
        up.terminate()
        up.wait(timeout=30)
    except subprocess.TimeoutExpired:
        sys.stderr.write("the demo's services do not stop by themselves; they are killed\n")
    finally:
        try:
            os.killpg(up.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        up.wait()


COMMANDS: Final = (demo,)


# -- audit: the ledger against the shop's data and the expectations of the sheet's author


@dataclass(frozen=True, slots=True)
class Finding:
    """One audited claim and its contradictions (none if it holds)."""

    claim: str
    contradictions: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.contradictions


@dataclass(frozen=True, slots=True)
class ReportRows:
    """A downloaded report: row number -> status, row number -> text of the first column, rows that occur more than once,
    and the number of each error among the rejected rows."""

    statuses: Mapping[int, str]
    codes: Mapping[int, str]
    repeated: tuple[int, ...]
    rejections: Mapping[str, int] = field(default_factory=dict)


_MAIN: Final = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_ID: Final = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"


def _sheets(path: Path) -> Iterator[dict[int, dict[str, str]]]:
    """The sheets of a workbook that this demo has written, each as row number -> column letters -> text. Uses the standard
    library only, not the audited readers."""
    with zipfile.ZipFile(path) as book:

        def part(name: str) -> ElementTree.Element:
            return ElementTree.fromstring(book.read(name))  # noqa: S314 - written by this program

        has_texts = "xl/sharedStrings.xml" in book.namelist()
        texts = ["".join(each.itertext()) for each in part("xl/sharedStrings.xml")] if has_texts else []
        targets = {each.get("Id"): each.get("Target", "") for each in part("xl/_rels/workbook.xml.rels")}
        for sheet in part("xl/workbook.xml").iter(f"{_MAIN}sheet"):
            rows: dict[int, dict[str, str]] = {}
            for row in part(posixpath.join("xl", targets[sheet.get(_ID)])).iter(f"{_MAIN}row"):
                found = {re.sub("[0-9]", "", cell.get("r", "")): _text(cell, texts) for cell in row}
                rows[int(row.get("r", "0"))] = {letters: text for letters, text in found.items() if text}
            yield rows


def _text(cell: ElementTree.Element, texts: Sequence[str]) -> str:
    """A cell as the shop reads a code: stripped, a whole number without a decimal point."""
    kind, value = cell.get("t"), cell.findtext(f"{_MAIN}v", "")
    if kind == "inlineStr":
        return "".join(cell.itertext()).strip()
    if kind == "s":
        return texts[int(value)].strip()
    if kind is None and value and float(value).is_integer():
        return str(int(float(value)))
    return value.strip()


def sheet_codes(path: Path, header_row: int) -> dict[int, str]:
    """Row number -> campaign code, of the sheet's non-blank rows; independent of the audited readers."""
    rows = next(_sheets(path))
    return {number: cells.get("A", "") for number, cells in rows.items() if number > header_row and cells}


def read_report(path: Path) -> ReportRows:
    """Reads a report. Its first column is the sheet's first."""
    statuses: dict[int, str] = {}
    codes: dict[int, str] = {}
    repeated: list[int] = []
    rejections: Counter[str] = Counter()
    for sheet in _sheets(path):
        head, *rows = sheet.values() or [{}]
        at = {header: column for column, header in head.items()}
        for row in rows:
            number = int(row[at["row"]])
            if number in statuses:
                repeated.append(number)
            statuses[number], codes[number] = row.get(at["status"], ""), row.get("A", "")
            if statuses[number] == "rejected":
                rejections[row.get(at["error"], "")] += 1
    return ReportRows(statuses, codes, tuple(repeated), rejections)


def _equal(what: str, found: Any, wanted: Any) -> list[str]:
    return [] if found == wanted else [f"{what}: {found}, not {wanted}"]


def _shortened(sentences: Iterable[str]) -> tuple[str, ...]:
    found = list(sentences)
    return (*found[:10], f"... and {len(found) - 10} more") if len(found) > 10 else tuple(found)


def audit_products(
    progress: Mapping[str, Any], products: Sequence[Mapping[str, Any]], planned: Collection[str], enrolled: Sequence[str]
) -> list[Finding]:
    """Arguments: the Task's progress; what was sent; the skus that the shop should refuse; the shop's enrolments."""
    counts = progress["counts"]
    wanted = {product["sku"] for product in products} - set(planned)
    wrong = [f"{sku} is enrolled though it was refused" for sku in sorted(set(enrolled) - wanted)]
    wrong += [f"{sku} is not enrolled" for sku in sorted(wanted - set(enrolled))]
    return [
        Finding(
            f"`finish` of the products, {counts['finish']:,}, is what the shop has enrolled",
            _shortened(_equal("enrolments", len(enrolled), counts["finish"])),
        ),
        Finding(
            f"every product is accounted for; the {counts['failed']:,} that were refused have no enrolment",
            _shortened(
                [
                    *_equal("finish + failed", counts["finish"] + counts["failed"], len(products)),
                    *_equal("failed", counts["failed"], len(planned)),
                    *wrong,
                ]
            ),
        ),
    ]


def audit_campaigns(
    progress: Mapping[str, Any], sheet: Mapping[int, str], report: ReportRows, codes: Sequence[str], expected: Any
) -> list[Finding]:
    """Arguments: the Task's progress; the codes by row of the sheet; the report of what did not succeed; the shop's
    campaigns; what the sheet's author expects (``Expected`` of the example)."""
    counts, rejected = progress["counts"], progress["split"]["rejected"]
    missing = Counter(sheet.values()) - Counter(codes)
    reported = Counter(sheet.get(row, "") for row in report.statuses)
    by_status = Counter(report.statuses.values())
    disagreements = expected.disagreements(
        rejected=[row for row, status in report.statuses.items() if status == "rejected"],
        refused=[row for row, status in report.statuses.items() if status != "rejected"],
        codes=codes,
    )
    return [
        Finding(
            f"`finish` of the campaigns, {counts['finish']:,}, is what the shop has created",
            _shortened(_equal("campaigns", len(codes), counts["finish"])),
        ),
        Finding(
            f"every row of the sheet, {expected.rows:,}, is accounted for",
            _shortened(
                [
                    *_equal("rows of the sheet", len(sheet), expected.rows),
                    *_equal("total + rejected", counts["total"] + rejected, expected.rows),
                    *_equal("finish + failed", counts["finish"] + counts["failed"], counts["total"]),
                ]
            ),
        ),
        Finding(
            f"the report, {len(report.statuses):,} rows, is the sheet less what the shop has",
            _shortened(
                [
                    *(f"row {row} stands in the report twice" for row in report.repeated),
                    *_differences(reported, missing),
                    *_equal("failed rows of the report", by_status["failed"], counts["failed"]),
                    *_equal("rejected rows of the report", by_status["rejected"], rejected),
                    *(
                        f"row {row} of the report has code {code!r}, the sheet {sheet.get(row)!r}"
                        for row, code in report.codes.items()
                        if code != sheet.get(row)
                    ),
                ]
            ),
        ),
        Finding("all of it is as the sheet's author expected, row by row", _shortened(disagreements)),
    ]


def audit_export(progress: Mapping[str, Any], path: Path, rows: int, total: Decimal) -> list[Finding]:
    """Arguments: the Task's progress; the downloaded file; the rows of the shop's table and the sum of its prices."""
    result = progress["result"] or {}
    with path.open("rb") as body:
        digest = hashlib.file_digest(body, "sha256").hexdigest()
    with path.open(encoding="utf-8-sig", newline="") as text:
        found = [(int(row["id"]), Decimal(row["price"])) for row in csv.DictReader(text)]
    return [
        Finding(
            f"the exported file has all {rows:,} rows of the price list, each once, and the same sum",
            _shortened(
                [
                    *_equal("rows", len(found), rows),
                    *_equal("different rows", len({key for key, _ in found}), rows),
                    *_equal("sum of the prices", sum((price for _, price in found), Decimal(0)), total),
                ]
            ),
        ),
        Finding(
            "the ledger says how many rows the file has, and its digest",
            _shortened([*_equal("rows", result.get("rows"), len(found)), *_equal("digest", result.get("sha256"), digest)]),
        ),
    ]


def _differences(reported: Counter[str], missing: Counter[str]) -> list[str]:
    sentences = [
        f"code {code!r} is not in the shop, and {n} row(s) of it not in the report"
        for code, n in (missing - reported).items()
    ]
    return sentences + [f"code {code!r} is in the report {n} time(s) too often" for code, n in (reported - missing).items()]


# -- HTTP client


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: ``status``, ``headers`` (names in lower case) and the ``body`` as bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """Calls to one server, each on its own connection.

    Arguments: ``base``, e.g. ``http://127.0.0.1:8000/``; ``timeout`` in seconds. Raises :class:`Unavailable` if the server
    does not answer or answers 500 or more, :class:`InputError` with the detail for 400 or more. Ignores proxies of the
    environment: the server is local.
    """

    def __init__(self, base: str, *, timeout: float = 60.0) -> None:
        parts = urlsplit(base)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout = timeout

    def get(self, path: str, **headers: str) -> Answer:
        """GET; headers are keyword arguments with _ for -."""
        return self._call("GET", path, None, {name.replace("_", "-"): value for name, value in headers.items()})

    def post_json(self, path: str, value: Any) -> Answer:
        return self._call("POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def post_file(self, path: str, file: Path, fields: Mapping[str, str]) -> Answer:
        """POST a file with form fields, as a browser's form does. The file is held in memory."""
        boundary = secrets.token_hex(16)
        parts = [_part(boundary, f'name="{name}"', value.encode()) for name, value in fields.items()]
        parts.append(_part(boundary, f'name="file"; filename="{file.name}"', file.read_bytes()))
        body = b"".join(parts) + f"--{boundary}--\r\n".encode()
        return self._call("POST", path, body, {"Content-Type": f"multipart/form-data; boundary={boundary}"})

    def _call(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"http://{self._host}:{self._port} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise _refusal(method, path, answer)
        return answer


def _part(boundary: str, disposition: str, content: bytes) -> bytes:
    return f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + content + b"\r\n"


def _refusal(method: str, path: str, answer: Answer) -> AsyncTaskError:
    try:
        problem = answer.json()
        detail = str(problem.get("detail") or problem.get("title"))
    except (ValueError, AttributeError):
        detail = answer.body[:200].decode("utf-8", "replace")
    kind = Unavailable if answer.status >= 500 else InputError
    return kind(f"{method} {path}: {answer.status}: {detail}")
