"""The shared flags (every field of the configuration, ``-A``, ``--json``) and the application they select."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pwd
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from asynctask.cli.output import Output, clean
from asynctask.config import ENV_PREFIX, Config, load, setting_types, shown
from asynctask.errors import ConfigError
from asynctask.logs import log_to_stderr
from asynctask.sidekiq.worker_file import WorkerFile, read_worker_file

if TYPE_CHECKING:
    from asynctask.app import AsyncTask

# Settings of one process: the flags of a command may differ from what the application was built with.
OF_A_PROCESS: Final = frozenset(
    {"concurrency", "processes", "queues", "strict_queues", "shutdown_s", "app"}
    | {"host", "port", "web_threads", "access_log"}
)
TASK_ID: Final = click.IntRange(1, 2**63 - 1)
_SHORT: Final = {"app": ("-A",)}
_ENVIRONMENTS: Final = ("APP_ENV", "RAILS_ENV", "RACK_ENV")  # in Sidekiq's order


class Session:
    """One call of the program: its flags, its output, and the application, loaded on demand.

    Arguments: ``environ``, the variables to read settings from. While the application is loaded the flags are written
    to them: an application is built when its module is imported, and child processes must see the same. :meth:`close`
    undoes it.
    """

    def __init__(self, out: Output, environ: MutableMapping[str, str] | None = None) -> None:
        self.out = out
        self.environ = os.environ if environ is None else environ
        self.flags: dict[str, Any] = {}
        self.file: WorkerFile | None = None
        self._from_file: frozenset[str] = frozenset()
        self._stack = ExitStack()
        self._app: AsyncTask | None = None

    @property
    def target(self) -> str:
        """``module:app`` from the flag or ``ASYNCTASK_APP``; may be empty."""
        return str(self.flags.get("app") or self.environ.get(ENV_PREFIX + "APP", ""))

    def config(self) -> tuple[Config, dict[str, str]]:
        """The settings from flags and environment, and the origin of each. Raises :class:`ConfigError`."""
        config, origins = load(self.flags, self.environ)
        return config, {name: self.origin(name) or origin for name, origin in origins.items()}

    def take_file(self, path: str | None, environment: str | None) -> None:
        """Reads the file of ``-C`` as if its lines were flags; a given flag takes precedence.

        Arguments: ``environment``, from ``-e``; by default that of Ruby's environment variables. Raises
        :class:`ConfigError`.
        """
        if path is None:
            if environment is not None:
                raise click.UsageError("-e names a section of a file: name the file with -C")
            return
        chosen = environment or next(
            (self.environ[name] for name in _ENVIRONMENTS if self.environ.get(name)), "development"
        )
        self.file = read_worker_file(Path(path), chosen, named=environment is not None)
        settings = dict(self.file.settings)
        if self.flags.get("queues") is not None:  # the order belongs to the queues
            settings.pop("strict_queues", None)
        applied = {name: value for name, value in settings.items() if self.flags.get(name) is None}
        self.flags.update(applied)
        self._from_file = frozenset(applied)
        if self.file.passed_over:
            self.out.note(f"{path}: passed over what is Ruby's alone: {clean(', '.join(self.file.passed_over))}")

    def origin(self, name: str) -> str | None:
        """``flag`` or ``file`` (of ``-C``) if a setting came from there, else None."""
        if name in self._from_file:
            return "file"
        return "flag" if name in self.flags else None

    def app(self, *, required: str = "") -> AsyncTask:
        """The application of ``-A``; without it one that has no workers, enough for commands that query or control.

        Arguments: ``required``, why the command needs ``-A``. Raises :class:`click.UsageError`, :class:`ConfigError`.
        """
        if self._app is None:
            if required and not self.target:
                raise click.UsageError(
                    f"{required}: name your application with -A module:app, or set {ENV_PREFIX}APP;"
                    " `asynctask demo` shows one at work"
                )
            self.config()  # reports a bad value as that of its flag, not as a failed import
            self._stack.enter_context(environment(self.flags, self.environ))
            self._app = self._build()
            self._stack.callback(self._app.close)
            log_to_stderr(self._app.config.log_level, self._app.config.log_format)
            self._refuse_overruled(self._app.config)
        return self._app

    def existing(self) -> AsyncTask:
        """The application for a command that queries or controls existing data: it creates no database.

        Raises :class:`ConfigError` if the SQLite file does not exist, and as :meth:`app`.
        """
        from asynctask.database.engine import missing_file

        app = self.app()
        if (path := missing_file(app.config.database_url)) is not None:
            named = "" if self.target else f", or -A module:app ({ENV_PREFIX}APP) for an application that says which"
            raise ConfigError(
                f"there is no database {path}, so there is nothing to query or control. Is this the right folder? Name"
                f" another database with --database-url ({ENV_PREFIX}DATABASE_URL){named}; `asynctask db upgrade` makes a"
                " new one"
            )
        return app

    def _build(self) -> AsyncTask:
        if self.target:
            return load_app(self.target)
        from asynctask.app import AsyncTask

        return AsyncTask()

    def _refuse_overruled(self, config: Config) -> None:
        """Raises :class:`ConfigError` where the application's code sets a setting otherwise than a flag."""
        for name, value in self.flags.items():
            if name not in OF_A_PROCESS and getattr(config, name) != value:
                where = "--" + name.replace("_", "-")
                if name in self._from_file and self.file is not None:
                    where = f"{name} of {self.file.path}"
                raise ConfigError(
                    f"{where} has no effect: {self.target} sets {name} itself ({shown(name, getattr(config, name))!r});"
                    f" leave it out there, or leave {name} out of AsyncTask(...)"
                )

    def setting(self, config: Config, name: str) -> Any:
        """A setting of a process: the command's flag, else the application's value."""
        value = self.flags.get(name)
        return getattr(config, name) if value is None else value

    def close(self) -> None:
        """Closes the application and restores the environment."""
        self._app = None
        self._stack.close()


@contextmanager
def environment(settings: Mapping[str, Any], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Sets settings as environment variables within the block."""
    values = {ENV_PREFIX + name.upper(): str(value) for name, value in settings.items() if value is not None}
    with variables(values, environ):
        yield


@contextmanager
def variables(values: Mapping[str, str], environ: MutableMapping[str, str]) -> Iterator[None]:
    """Sets environment variables within the block."""
    before = {name: environ.get(name) for name in values}
    environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


pass_session: Final = click.make_pass_decorator(Session)


class SettingOption(click.Option):
    """A flag for a field of the configuration; it is stored in the session, not passed to the command."""


def setting_options(*, hidden: bool) -> list[click.Option]:
    """A flag for each field of :class:`Config`, in its order."""
    types = setting_types()
    made: list[click.Option] = []
    for field in fields(Config):
        flag = "--" + field.name.replace("_", "-")
        kind = types[field.name]
        made.append(
            SettingOption(
                [*_SHORT.get(field.name, ()), f"{flag}/--no-{flag[2:]}" if kind is bool else flag, field.name],
                type=None if kind is bool else kind,
                default=None,
                help=field.metadata["help"],
                expose_value=False,
                hidden=hidden,
                callback=store_setting,
            )
        )
    return made


def store_setting(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Stores the value of a setting's flag, long or short, in the session."""
    if value is not None and value != () and option.name is not None:
        said = " ".join(value) if isinstance(value, tuple) else value
        context.find_object(Session).flags[option.name.removeprefix("short_")] = said  # type: ignore[union-attr]
    return value


def _store_json(context: click.Context, _option: click.Parameter, value: bool) -> None:
    if value:
        context.find_object(Session).out.json = True  # type: ignore[union-attr]


def json_option() -> click.Option:
    """``--json``."""
    return click.Option(
        ["--json", "as_json"],
        is_flag=True,
        expose_value=False,
        callback=_store_json,
        help="Write one JSON document to stdout and nothing else.",
    )


def _with_shared(params: Sequence[click.Parameter] | None, *, hidden: bool) -> list[click.Parameter]:
    own = list(params or ())
    own_flags = {flag for each in own for flag in (*each.opts, *each.secondary_opts)}
    shared = [o for o in setting_options(hidden=hidden) if not own_flags.intersection((*o.opts, *o.secondary_opts))]
    return [*own, json_option(), *shared]


def file_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``-C`` and ``-e``, for a command that passes both to :meth:`Session.take_file`."""
    named = click.option("-e", "--environment", default=None, help="Section of that file to use (else APP_ENV, RAILS_ENV).")
    file = click.option("-C", "--config", "config_file", default=None, help="YAML file with settings, as Sidekiq's are.")
    return file(named(function))


def who() -> str:
    """The user for a Task's log: by the process's user id, which no variable of the environment changes."""
    try:
        return f"{pwd.getpwuid(os.getuid()).pw_name} (command line)"
    except KeyError:  # a user without a name, in a container for instance
        return f"uid {os.getuid()} (command line)"


def next_page(after: object) -> str:
    """The running command with the flags that it was given, but for another ``--after``: what shows the next page."""
    context = click.get_current_context()
    words = context.command_path.split()
    for each in context.command.params:
        name = each.name or ""
        if name == "after" or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name)
        if value is not None:  # None: a flag that is not passed to the command, such as a setting
            flag = [] if isinstance(each, click.Argument) else [each.opts[-1]]
            words += flag if value is True else [*flag, str(value)]
    return clean(shlex.join([*words, "--after", str(after)]))


class Command(click.Command):
    """A command that takes the shared flags after its name too."""

    def __init__(self, name: str | None, *, params: list[click.Parameter] | None = None, **options: Any) -> None:
        super().__init__(name, params=_with_shared(params, hidden=True), **options)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text("-A and every setting of `asynctask --help` are taken here too.")


class Group(click.Group):
    """A group that takes the shared flags before its commands. Only the root lists them in its help."""

    command_class = Command

    def __init__(
        self, name: str | None, *, params: list[click.Parameter] | None = None, lists: bool = False, **options: Any
    ) -> None:
        super().__init__(name, params=_with_shared(params, hidden=not lists), **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:  # click would raise its help as an error
            out = ctx.find_object(Session).out  # type: ignore[union-attr]
            if out.json:  # a program reads no help
                ctx.fail("Missing command.")
            out.line(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        settings: list[tuple[str, str]] = []
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                (settings if isinstance(each, SettingOption) and each.name != "app" else own).append(record)
        with formatter.section("Options"):
            formatter.write_dl(own)
        self.format_commands(ctx, formatter)
        if settings:
            with formatter.section(f"Settings (also after the command, or as {ENV_PREFIX}<NAME>)"):
                formatter.write_dl(settings)


# -- loading the application of ``-A``, and the demo's example


class BadTarget(ConfigError):
    """The target of ``-A`` cannot be loaded or is no application."""

    code = "bad_target"


def load_app(target: str) -> AsyncTask:
    """The application at ``module:attribute`` or ``path/to/file.py:attribute``; the attribute defaults to ``app``.

    Puts the current folder on ``sys.path``, as flask and celery do. Raises :class:`BadTarget`.
    """
    from asynctask.app import AsyncTask

    name, colon, attribute = target.rpartition(":")
    if not colon:
        name, attribute = target, "app"
    if not name or not attribute:
        raise BadTarget(f"-A {target!r} names no application: write module:attribute or path/to/file.py:attribute")
    module = load_file(Path(name)) if name.endswith(".py") else _load_module(name)
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, AsyncTask):
        return found
    apps = sorted(key for key, value in vars(module).items() if isinstance(value, AsyncTask))
    hint = f"it has {', '.join(f'{name}:{key}' for key in apps)}" if apps else "it has no AsyncTask() at its top level"
    what = "is not there" if found is None else f"is a {type(found).__name__}, no AsyncTask"
    raise BadTarget(f"-A {target}: {attribute!r} {what}; {hint}")


def load_file(path: Path) -> ModuleType:
    """Imports a Python file, with its own folder on ``sys.path``. Raises :class:`BadTarget`."""
    path = path.resolve()
    if not path.is_file():
        raise BadTarget(f"there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    # A file called json.py must not become the module json of everybody else.
    clashes = loaded is not None or importlib.util.find_spec(path.stem) is not None
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}" if clashes else path.stem
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _add_to_path(path.parent)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise BadTarget(_import_error(str(path), error)) from error
    return module


def _load_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise BadTarget(
                f"there is no module {error.name!r} in {Path.cwd()} or among the installed packages;"
                " a file is written path/to/file.py:app"
            ) from error
        raise BadTarget(_import_error(name, error)) from error


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_error(name: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}, line {error.lineno})"
    return f"{name} cannot be imported: {type(error).__name__}: {error}{where}"


def examples_folder() -> Path:
    """The folder of the examples: in the installed package, or beside it in a checkout. Raises :class:`BadTarget`."""
    package = Path(str(resources.files("asynctask")))
    for folder in (package / "_examples", package.parent / "examples"):
        if (folder / "promotions.py").is_file():
            return folder
    raise BadTarget("the examples are not installed with the package; install asynctask from its wheel")
