"""The root of the command line: its commands, and what an error means for the exit code."""

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

__all__ = ["Root", "build", "run"]

_EXTRAS: Final = {"psycopg": "postgresql", "pymysql": "mysql", "dramatiq": "dramatiq", "yaml": "yaml"}
_HELP = """Hand over a list, and have every item accounted for.

Exit codes: 0 ok, 1 finished with failures, 2 usage or bad input, 3 unavailable.
"""


# Which module a command is in: a worker stays for months, and need not hold the code of the others in memory.
_MODULES: Final = {
    "demo": ("demo",),
    "serve": ("up", "web", "worker", "split-task"),
    "submit": ("submit", "watch", "check-list"),
    "tasks": ("tasks", "show", "set", "pause", "resume", "cancel", "retry", "report", "template"),
    "operations": ("queues", "retries", "scheduled", "dead", "processes", "db", "doctor", "config", "middleware"),
}
_MODULE_OF: Final = {command: module for module, commands in _MODULES.items() for command in commands}


class Root(Group):
    """A group that loads the module of a command when it is asked for it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULE_OF:
            return None
        return next(command for command in _loaded(_MODULE_OF[cmd_name]) if command.name == cmd_name)


def _loaded(module: str) -> Sequence[click.Command]:
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
    return Root(
        "asynctask",
        help=_HELP,
        lists=True,
        params=[_version()],
        context_settings={"max_content_width": 110, "help_option_names": ["-h", "--help"]},
    )


def _version() -> click.Option:
    def show(context: click.Context, _option: click.Parameter, value: bool) -> None:
        if value:
            click.echo(f"asynctask {__version__}")
            context.exit()

    return click.Option(
        ["--version"], is_flag=True, expose_value=False, is_eager=True, callback=show, help="Show the version."
    )


def run(
    argv: Sequence[str],
    *,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    environ: MutableMapping[str, str] | None = None,
) -> int:
    """Runs one command and returns its exit code.

    Arguments: ``argv``, the words after the program's name; the streams and the environment, by default the process's.
    """
    # Looked for by hand, for a usage error is found before the flag is read.
    as_json = "--json" in argv[: argv.index("--")] if "--" in argv else "--json" in argv
    _lenient(sys.stdout if stdout is None else stdout)
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
        # Whoever read our output has seen enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    finally:
        session.close()


def _with_help(error: Exception) -> Exception:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return click.UsageError(f"{error.format_message()} (see `{error.ctx.command_path} --help`)")
    return error


def _lenient(stream: IO[str]) -> None:
    """A terminal that cannot show a character gets its escape; no command fails over that."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
