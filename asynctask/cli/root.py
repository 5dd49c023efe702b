"""The root of the command line: finds commands, and maps errors to exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import IO, Final

import click

from asynctask import __version__
from asynctask.cli.options import Group, Session
from asynctask.cli.output import DETACHED, OK, Output
from asynctask.errors import AsyncTaskError, not_installed

_EXTRAS: Final = {
    "psycopg": "postgresql", "pymysql": "mysql", "celery": "celery", "dramatiq": "dramatiq", "rq": "rq",
    "huey": "huey", "yaml": "yaml", "pyarrow": "parquet", "fsspec": "buckets", "s3fs": "buckets", "django": "django",
    "django_tasks": "django",
}  # fmt: skip
_HELP = """Run lists of items as background jobs, with a recorded outcome for every item.

Exit codes: 0 ok, 1 finished with failures, 2 usage or bad input, 3 unavailable.
"""


# The module of each command, loaded on demand: a worker runs for months and need not keep the others in memory.
_MODULES: Final = {
    "demo": "demo",
    "serve": "up web worker split-task",
    "submit": "submit add export perform watch check-list",
    "tasks": "tasks show set pause resume cancel retry seal callbacks jobs job search stop start restart link report"
    " result template",
    "operations": "queues history retries scheduled dead processes schedules rates db doctor purge config middleware"
    " workers",
}
_MODULE_OF: Final = {command: module for module, commands in _MODULES.items() for command in commands.split()}


class Root(Group):
    """A group that loads a command's module on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULE_OF:
            return None
        return next(command for command in _load_commands(_MODULE_OF[cmd_name]) if command.name == cmd_name)


def _load_commands(module: str) -> Sequence[click.Command]:
    match module:
        case "demo":
            from asynctask.cli import demo

            return demo.COMMANDS
        case "serve":
            from asynctask.cli import serve

            return serve.COMMANDS
        case "submit":
            from asynctask.cli import submit

            return submit.COMMANDS
        case "tasks":
            from asynctask.cli import tasks

            return tasks.COMMANDS
        case _:
            from asynctask.cli import operations

            return operations.COMMANDS


def build() -> Root:
    """The root group with every command."""
    root = Root(
        "asynctask",
        help=_HELP,
        lists=True,
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    )
    return click.version_option(__version__, message="asynctask %(version)s", help="Show the version.")(root)


def run(
    argv: Sequence[str],
    *,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> int:
    """Runs one command and returns its exit code.

    Arguments: ``argv`` without the program's name; the streams and the environment, by default the process's.
    """
    # Found without click, for a usage error may come before the flag is parsed.
    as_json = "--json" in argv[: argv.index("--")] if "--" in argv else "--json" in argv
    _escape_unencodable(sys.stdout if stdout is None else stdout)
    out = Output(stdout, stderr, json=as_json)
    session = Session(out, environ)
    try:
        code = build().main(args=list(argv), prog_name="asynctask", standalone_mode=False, obj=session)
        return code if isinstance(code, int) else OK
    except (AsyncTaskError, click.ClickException) as error:
        return out.error(_with_help(error))
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get(str(error.name))) is None:
            raise
        return out.error(click.UsageError(not_installed(str(error.name), extra)))
    except (click.Abort, KeyboardInterrupt):
        return DETACHED
    except OSError as error:
        if error.errno != errno.EPIPE:
            return out.error(click.UsageError(f"{error.strerror or error}: {error.filename or 'a file'}"))
        # The reader of our output has closed it (head, for instance). Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    finally:
        session.close()


def _with_help(error: Exception) -> Exception:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return click.UsageError(f"{error.format_message()} (see `{error.ctx.command_path} --help`)")
    return error


def _escape_unencodable(stream: IO[str]) -> None:
    """Escapes characters that the terminal's encoding lacks, instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
