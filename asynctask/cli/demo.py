"""``demo``: the whole system on SQLite, with a real sheet and real processes, and an audit of the outcome.

What it sends, and the audit, is ``examples/demo.py``, which travels in the wheel with the shop; here are the processes.

With ``--engine`` the jobs run on Celery, Dramatiq or RQ: a private Redis, and the engine's own worker command.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, Final

import click

from asynctask.cli.options import Command, Session, environment, examples_folder, load_file, pass_session, variables
from asynctask.cli.output import COUNTED, FAILURES, OK, Bars, Output, count, summary
from asynctask.cli.serve import address, child_argv, free_port, served_at, warn_if_open
from asynctask.clock import SystemClock
from asynctask.config import ENV_PREFIX, socket_path
from asynctask.errors import ConfigError, Unavailable, not_installed

_MARK: Final = ".asynctask-demo"
_SHOP: Final = "PROMOTIONS_DATABASE_URL"
_EXPORTED: Final = (50_000, 20)
"""Rows of the price list that is exported, and its shards."""

_EXPORTED_ON_ENGINE: Final = (10_000, 4)
"""The same on an engine: RQ starts a process for each shard."""

_ROWS: Final[Mapping[str | None, int]] = {"rq": 1_000}  # RQ starts a process for each job
_START_S: Final = 60.0
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
        self._folder, self._rows, self._export = folder, rows, exported
        self._clock, self._pause = SystemClock(), threading.Event()
        self._host = config.host
        if socket_path(config.host):
            raise ConfigError(f"the demo's page needs an address: leave out host {config.host!r}, or give 127.0.0.1")
        port = free_port(config.host, session.flags.get("port", 0))
        warn_if_open(config.host, port, has_tokens=False)
        self.url = address(config.host, port)
        self._examples = examples_folder()
        self._demo = load_file(self._examples / "demo.py")
        self._api = self._demo.Api(self.url)
        self.settings = {
            **session.flags,
            "tokens": "",  # the demo's own requests have none
            "database_url": f"sqlite:///{folder / 'asynctask.db'}",
            "data_dir": str(folder / "asynctask-data"),
            "port": port,
            "processes": session.flags.get("processes", 1),
        }
        self._shop_file = self._examples / "promotions.py"

    @contextmanager
    def services(self) -> Iterator[None]:
        """The web server and the workers, ready to use; the end of the block stops them."""
        with self._running(child_argv(f"{self._shop_file}:app", "up", {}), {}):
            yield

    @contextmanager
    def services_on(self, engine: str) -> Iterator[None]:
        """A Redis, the web server and the workers of an engine, in the same way. Raises :class:`ConfigError` where there is
        no redis-server."""
        from asynctask.supervisor import ChildSpec, supervising
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
        from asynctask.supervisor import LIFELINE

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
        """Sends the lists, follows them and audits the outcome. Returns the command's document."""
        shop, sheets = load_file(self._shop_file), load_file(self._examples / "untidy_sheet.py")
        prices, shards = self._export
        made = self._demo.Demo(self.url, self._folder, shop, sheets, rows=self._rows, prices=prices, shards=shards)
        sent = made.send(self.out.line)
        with Bars(self.out, self._clock.monotonic) as bars:
            followed = made.follow(sent, bars.show)
        found: dict[str, Any] = made.audit(followed)
        return found

    def print_outcome(self, found: Mapping[str, Any], keep: bool) -> None:
        out = self.out
        out.line()
        for each in found["tasks"]:
            rate = f"{each['rows_per_s']:,.0f} rows/s"
            out.line(f"{each['title']}: {count(each['rows'], 'row')} in {each['seconds']:.1f} s ({rate})", style="bold")
            out.line(f"  {summary(each['progress']).plain}")
        out.line(f"  {found['retried']} products were retried after the inventory service had not answered")
        out.line()
        groups = [{**error, "of": each["title"]} for each in found["tasks"] for error in each["errors"]]
        columns = {"count": COUNTED["count"], "status": "status", "of": "of", "message": "message"}
        out.table(columns, groups, longest=90)
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
