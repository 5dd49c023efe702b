"""The command line as far as it needs no application: flags, errors, exit codes, what reaches a terminal."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa

from asynctask import AsyncTask, cli
from asynctask.cli import main
from asynctask.cli.options import environment
from asynctask.cli.output import Bars, Output, clean, count, duration, exit_code, pace, state_of, style_of, summary
from asynctask.cli.root import build, run
from asynctask.cli.serve import address, child_argv, free_port
from asynctask.cli.submit import follow, outcome, priority_value
from asynctask.config import load, without_secrets
from asynctask.database.engine import Database
from asynctask.database.retrying import translated
from asynctask.errors import ConfigError, Conflict, InputError, LedgerUnavailable, NotFound, Problem, SchemaOutdated
from asynctask.sidekiq.server import Server
from examples.demo import ReportRows, audit_campaigns


def call(*argv: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = run(argv, stdout=out, stderr=err, environ={} if environ is None else environ)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("url", ["nonsense", "postgresql://u:secret@ss:w0rd@h:5432/a", "mysql://u:secret@h:port/a"])
def test_a_database_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    code, out, err = call("db", "check", "--database-url", url)
    assert (code, out) == (2, "")
    assert "%40" in err
    assert "Traceback" not in err
    assert "w0rd" not in err
    assert "secret" not in err


@pytest.mark.parametrize("scheme", ["mysql+mysqldb", "mysql+pymysql", "mariadb+pymysql2", "postgresql+asyncpg"])
def test_a_driver_in_the_database_url_is_refused_with_the_scheme_to_write(scheme: str) -> None:
    code, _, err = call("db", "check", "--database-url", f"{scheme}://h/a")
    assert code == 2
    assert f"write {scheme.partition('+')[0]}:// without a driver" in err


SEVERAL = {
    "a,b/shop": ("a,b", "5432,5432"),
    "a:5433,b:5434/shop?target_session_attrs=read-write": ("a,b", "5433,5434"),
    "[::1]:5433,10.0.0.1/shop": ("::1,10.0.0.1", "5433,5432"),
    "a,b": ("a,b", "5432,5432"),
}


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
@pytest.mark.parametrize("rest", SEVERAL)
def test_a_url_as_libpq_writes_it_is_understood(scheme: str, rest: str) -> None:
    """Several hosts, and the scheme that hosting services write. Taken out: either. It was refused."""
    with closing(Database(f"{scheme}://shop:s%2Cecret,1@{rest}")) as database:
        given = database.engine.dialect.create_connect_args(database.url)[1]
        assert (given["host"], given["port"]) == SEVERAL[rest]
        assert (database.url.password, database.url.drivername) == ("s,ecret,1", "postgresql+psycopg")
        assert database.url.query.get("target_session_attrs") == ("read-write" if "target" in rest else None)
    with closing(Database(database.absolute_url)) as again:  # as a child process gets it
        assert again.url == database.url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://u:secret@a,/shop", "one:5432,two:5432/name"),
        ("postgresql://u:secret@a:x,b/shop", "one:5432,two:5432/name"),
        ("postgresql://u:secret@a,b/shop?host=c", "one:5432,two:5432/name"),
        ("postgresql://u:secret@a b,c/shop", "one:5432,two:5432/name"),
        ("mysql://u:secret@a,b/shop", "one host only"),
        ("postgresql://u:secret@127.0.0.1:1/shop?bogus=1", "bogus"),
        ("postgresql://127.0.0.1:1/shop?user=u&password=secret&bogus=1", "bogus"),
        ("mysql://u:secret@127.0.0.1:1/shop?bogus=1", "bogus"),
        ("mysql://127.0.0.1:1/shop?user=u&password=secret&bogus=1", "bogus"),
    ],
)
def test_a_database_url_that_no_driver_takes_is_refused_with_what_to_write(url: str, told: str) -> None:
    code, out, err = call("db", "check", "--database-url", url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
    assert "secret" not in err


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
@pytest.mark.parametrize("place", ["u:secret@127.0.0.1:1/shop", "127.0.0.1:1/shop?user=u&password=secret"])
def test_a_server_that_is_away_is_3_in_one_sentence_without_the_password(scheme: str, place: str) -> None:
    for command in ("upgrade", "check"):
        code, out, err = call("db", command, "--database-url", f"{scheme}://{place}")
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert "127.0.0.1" in err
        assert "secret" not in err


@pytest.mark.parametrize(
    ("name", "url", "shown"),
    [
        ("database_url", "postgresql://shop:GEHEIM@h/a?sslmode=require", "postgresql://***@h/a?sslmode=require"),
        (
            "database_url",
            "postgresql://h/a?user=u&sslpassword=GEHEIM&pass%77ord=GEHEIM",
            "postgresql://h/a?user=u&sslpassword=***&pass%77ord=***",
        ),
        ("database_url", "postgresql://h:5432/a?password=x@GEHEIM", "postgresql://***"),
        ("database_url", "postgresql://u:x?GEHEIM@h/a", "postgresql://***"),
        ("database_url", "postgresql://h/a?password=x'\"GEHEIM;GEHEIM", "postgresql://h/a?password=***"),
        ("database_url", "postgresql:u:GEHEIM", "***"),
        ("broker_url", "redis://:x/@GEHEIM@h:6379/0", "redis://***@h:6379/0"),
        ("broker_url", "unix:///run/redis?db=1&password=GEHEIM", "unix:///run/redis?db=1&password=***"),
        ("results_url", "s3://GEHEIM:GEHEIM@shop/exports", "s3://***@shop/exports"),
        ("results_url", "", ""),
    ],
)
def test_no_secret_of_a_url_is_shown(name: str, url: str, shown: str) -> None:
    environ = {f"ASYNCTASK_{name.upper()}": url}
    code, out, _ = call("config", "--json", environ=environ)
    assert code == 0
    assert next(each["value"] for each in json.loads(out)["settings"] if each["name"] == name) == shown
    assert "GEHEIM" not in call("config", environ=environ)[1]
    assert "GEHEIM" not in repr(load({name: url}, {})[0])


@pytest.mark.parametrize(
    "url", ["s3://shop/p?token=GEHEIM", "https://u:GEHEIM@shop/p", "u:GEHEIM@shop", "s3://u:GEHEIM x@shop"]
)
def test_a_url_that_is_no_bucket_is_refused_without_showing_it(url: str) -> None:
    for settings in ({"results_url": url}, {"results_url": [url]}, {"broker_url": url}):
        with pytest.raises(ConfigError) as refused:
            load(settings, {})
        assert "GEHEIM" not in str(refused.value)


def test_a_message_of_a_library_shows_no_secret_of_a_url() -> None:
    url = "s3://key:ge%2Fheim@shop/p?token=12345"
    said = (
        'Invalid bucket name "key:ge%2Fheim@shop" (key:ge/heim, 12345) of https://x:y@h/?X-Amz-Signature=ab&x=1, host=h'
        " password=zz"
    )
    assert without_secrets(said, url) == (
        'Invalid bucket name "***@shop" (***, ***) of https://***@h/?X-Amz-Signature=***&x=1, host=h password=***'
    )


@pytest.mark.parametrize("url", ["redis://:GEHEIM/x@h/0", "redis://u:x@h:GEHEIM/0", "redis://u:GE\u2100HEIM@h/0"])
def test_a_redis_url_that_cannot_be_read_is_refused_without_its_parts(url: str) -> None:
    with pytest.raises(ConfigError, match="%2F for /") as refused:
        Server(url)
    assert "GE" not in str(refused.value)


@pytest.mark.parametrize("command", ["upgrade", "check"])
@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda path: path.write_text("this is no database at all" * 50), "no SQLite database: name another"),
        (lambda path: path.mkdir(), "cannot be opened: let this user"),
    ],
    ids=["text", "folder"],
)
def test_a_file_that_is_no_database_is_3_with_what_to_do(
    tmp_path: Path, made: Callable[[Path], object], told: str, command: str
) -> None:
    made(tmp_path / "a.db")
    code, out, err = call("db", command, "--database-url", f"sqlite:///{tmp_path / 'a.db'}")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert told in err


def test_a_folder_that_cannot_be_written_is_3_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.db.lock").mkdir()
    code, out, err = call("db", "upgrade", "--database-url", f"sqlite:///{tmp_path / 'a.db'}")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "cannot be written" in err
    assert "let this user write its folder" in err


@pytest.mark.parametrize(
    ("statement", "told"),
    [("BEGIN IMMEDIATE", "another program holds the lock"), ("CREATE TABLE a (b)", "let this user write it")],
)
def test_a_file_that_refuses_is_said_with_what_to_do(tmp_path: Path, statement: str, told: str) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE c (d)")
        other.execute("BEGIN IMMEDIATE")
        mode = "rw" if "BEGIN" in statement else "ro"
        engine = sa.create_engine(f"sqlite:///file:{path}?mode={mode}&uri=true", connect_args={"timeout": 0})
        with pytest.raises(LedgerUnavailable, match=told), translated(None), engine.connect() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()


@pytest.mark.parametrize("group", ["", "db", "middleware"])
def test_a_group_without_a_command_prints_its_help(group: str) -> None:
    """Taken out: the group's own look for it. click raises its help as an error, and it became one line of 3,000."""
    code, out, err = call(*group.split())
    assert (code, err) == (0, "")
    assert out == call(*group.split(), "--help")[1] or out.startswith("Usage: asynctask")
    assert "Commands:" in out
    assert out.count("\n") > 5
    code, out, err = call(*group.split(), "--json")
    assert (code, out) == (2, "")
    assert "Missing command" in json.loads(err)["error"]["message"]


@pytest.mark.parametrize("argv", ["--json", "--json db", "db --json", "--json middleware"])
def test_a_program_that_names_no_command_is_told_so(argv: str) -> None:
    """Taken out: the look whether a program reads. `asynctask --json db` said nothing, with exit code 0."""
    code, out, err = call(*argv.split())
    assert (code, out) == (2, "")
    assert json.loads(err)["error"]["code"] == "usage"


def progress(**changes: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("enqueue", "working", "stopped", "finish", "failed", "error", "cancelled"), 0)
    counts |= changes.pop("counts", {"finish": 10})
    return {
        "task_id": 7,
        "title": "Spring sale",
        "worker": "enrol",
        "state": "finished",
        "state_reason": None,
        "done": True,
        "split": {"state": "sealed", "planned": 10, "created": 10, "rejected": 0},
        "counts": {"total": sum(counts.values()), **counts},
        "retrying": 0,
        "progress": {"percent": 100.0, "rate_per_s": None, "eta_s": None},
        "control": {"start_at": None},
        "started_at": None,
        "poll_after_ms": 1000,
        **changes,
    }


class Handle:
    """A Task whose next answers are given: progress objects, or errors to raise."""

    id = 7

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def progress(self) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


# --- settings as flags ---


def settings_of(text: str) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(text)["settings"]}


def test_a_setting_is_taken_before_the_command_and_after_it_and_the_latter_wins() -> None:
    code, out, _ = call("--json", "--max-rows", "5", "--max-columns", "6", "config", "--max-rows", "7")
    found = settings_of(out)
    assert code == 0
    assert (found["max_rows"]["value"], found["max_rows"]["origin"]) == (7, "flag")
    assert (found["max_columns"]["value"], found["max_columns"]["origin"]) == (6, "flag")


def test_config_tells_where_each_value_came_from_and_leaves_passwords_out() -> None:
    environ = {"ASYNCTASK_DATABASE_URL": "postgresql://anna:geheim@db/jobs", "ASYNCTASK_LOCALE": "ja"}
    code, out, _ = call("config", "--json", "--no-strict-queues", environ=environ)
    found = settings_of(out)
    assert code == 0
    assert found["locale"]["origin"] == "environment"
    assert found["strict_queues"] == found["strict_queues"] | {"value": False, "origin": "flag"}
    assert found["port"]["origin"] == "default"
    assert "geheim" not in out
    assert "anna" not in out


def test_a_flag_wins_over_the_environment() -> None:
    _, out, _ = call("config", "--json", "--locale", "zh_CN", environ={"ASYNCTASK_LOCALE": "ja"})
    assert settings_of(out)["locale"]["value"] == "zh_CN"


def test_a_value_that_cannot_work_is_a_usage_error_that_names_the_setting() -> None:
    assert call("config", "--max-rows", "0")[::2] == (2, "error: max_rows must be between 1 and any, not 0\n")
    code, out, err = call("config", "--max-rows", "many", "--json")
    assert (code, out) == (2, "")
    assert "max-rows" in json.loads(err)["error"]["message"]


def test_a_misspelt_variable_is_told_with_the_nearest_setting() -> None:
    code, _, err = call("config", environ={"ASYNCTASK_MAX_ROW": "5"})
    assert code == 2
    assert "ASYNCTASK_MAX_ROWS" in err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ASYNCTASK_URL", "http://127.0.0.1:8000"),
        ("ASYNCTASK_PORT", "tcp://10.0.0.1:80"),
        ("ASYNCTASK_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("ASYNCTASK_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("ASYNCTASK_SERVICE_HOST", "10.0.0.1"),
        ("ASYNCTASK_SERVICE_PORT_HTTP", "80"),
        ("ASYNCTASK_WEB_SERVICE_PORT", "80"),
        ("ASYNCTASK_WEB_PORT", "tcp://10.0.0.1:80"),
    ],
)
def test_a_variable_of_another_program_in_a_shared_environment_is_passed_over(name: str, text: str) -> None:
    """It was refused as an unknown setting: of workers in Ruby, and of a service in Kubernetes that is named asynctask."""
    code, out, err = call("config", "--json", environ={name: text})
    assert (code, err) == (0, "")
    assert {each["origin"] for each in settings_of(out).values()} == {"default"}


@pytest.mark.parametrize("name", ["ASYNCTASK_TOKEN", "ASYNCTASK_WEB_PORT", "ASYNCTASK_PORT_80", "ASYNCTASK_URLS"])
def test_other_names_are_refused(name: str) -> None:
    code, _, err = call("config", environ={name: "80"})
    assert (code, f"{name} is no setting" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "form"),
    [("KEEP_TRACEBACKS", "1, true or yes, or 0, false or no"), ("PORT", "a whole number"), ("LEASE_S", "a number")],
)
def test_a_value_that_cannot_be_read_says_what_to_write(name: str, form: str) -> None:
    code, _, err = call("config", environ={f"ASYNCTASK_{name}": "off"})
    assert (code, err.split(": ", 1)[1].strip()) == (2, f"ASYNCTASK_{name}='off': write {form}")


def test_settings_stand_in_the_environment_for_as_long_as_the_block_lasts() -> None:
    environ = {"ASYNCTASK_PORT": "1"}
    with environment({"port": 2, "locale": "ja", "app": None}, environ):
        assert environ == {"ASYNCTASK_PORT": "2", "ASYNCTASK_LOCALE": "ja"}
    assert environ == {"ASYNCTASK_PORT": "1"}


def test_every_command_takes_json_and_every_setting() -> None:
    def visit(command: click.Command) -> None:
        flags = {flag for each in command.params for flag in each.opts}
        assert {"--json", "-A", "--database-url", "--data-dir", "--locale", "--max-rows"} <= flags, command.name
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None, name
                visit(child)

    visit(build())


def test_every_command_of_a_module_is_found_under_its_name_and_none_is_left_out() -> None:
    folder = Path(cli.__file__).parent
    there = {
        str(command.name)
        for path in folder.glob("*.py")
        for command in getattr(importlib.import_module(f"asynctask.cli.{path.stem}"), "COMMANDS", ())
    }
    root = build()
    assert set(root.list_commands(click.Context(root))) == there


# --- errors and exit codes ---


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("bogus",), "bogus"),
        (("watch", "seven"), "seven"),
        (("watch", "0"), "0"),
        (("up",), "-A module:app"),
        (("worker",), "ASYNCTASK_APP"),
        (("submit", "no-such-file.csv", "--worker", "w"), "no-such-file.csv"),
        (("set", "7", "paralel=5"), "did you mean 'parallel'?"),
        (("set", "7", "parallel"), "name=value"),
        (("set", "7", "parallel=many"), "whole number"),
        (("set", "7", "priority=SOON"), "ADMIN_HIGH"),
        (("retry", "7", "--status", "finish"), "failed, error, cancelled"),
        (("report", "7", "-o", "report.pdf"), ".xlsx"),
        (("report", "7", "-o", "report.csv", "--rows", "some"), "some"),
        (("template", "enroll", "-o", "empty.pdf"), ".xlsx"),
        (("template", "enroll", "-o", "empty.xlsx"), "-A module:app"),
        (("demo", "--database-url", "sqlite:///x.db"), "--database-url"),
        (("demo", "--rows", "5"), "5"),
    ],
)
def test_a_usage_error_ends_with_2_and_says_how_to_mend_it(argv: tuple[str, ...], told: str) -> None:
    code, out, err = call(*argv)
    assert (code, out) == (2, "")
    assert told in err
    code, out, err = call(*argv, "--json")
    assert (code, out) == (2, "")
    assert told in json.loads(err)["error"]["message"]


def test_the_help_is_no_error() -> None:
    for argv in ((), ("--help",), ("db", "--help"), ("submit", "--help")):
        assert call(*argv)[0] in (0, 2 if not argv else 0)


def test_the_kind_of_an_error_decides_the_exit_code() -> None:
    assert exit_code(LedgerUnavailable("away")) == exit_code(SchemaOutdated("old")) == 3
    assert exit_code(InputError("bad")) == exit_code(NotFound("none")) == exit_code(Conflict("no")) == 2


def test_a_driver_that_is_not_installed_is_told_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    code, _, err = call("db", "check", "--database-url", "postgresql://127.0.0.1:1/x")
    assert code == 2
    assert "pip install 'asynctask-ledger[postgresql]'" in err


def test_a_bug_of_ours_does_not_look_like_rows_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_argv: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("asynctask.cli.root.run", broken)
    monkeypatch.setattr("asynctask.logs.log_to_stderr", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["tasks"])
    assert ended.value.code == 70
    assert "RuntimeError: a bug" in capsys.readouterr().err


def test_an_old_schema_is_3_with_the_command_that_mends_it(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    code, _, err = call("db", "check", "--database-url", url)
    assert code == 3
    assert "asynctask db upgrade" in err
    assert list(tmp_path.iterdir()) == [], "a look makes no file"
    code, out, _ = call("db", "upgrade", "--json", "--database-url", url)
    assert (code, json.loads(out)["changed"]) == (0, True)
    assert json.loads(call("db", "upgrade", "--json", "--database-url", url)[1])["changed"] is False
    assert call("db", "check", "--database-url", url)[0] == 0


def test_an_error_lists_the_rows_that_are_wrong() -> None:
    err = io.StringIO()
    problems = [Problem(n, "Budget", "wrong_type", "is no number", "\x1b[31mten") for n in range(1, 15)]
    assert Output(io.StringIO(), err).error(InputError("14 rows are wrong", errors=problems)) == 2
    assert err.getvalue().startswith("error: 14 rows are wrong\n  row 1, Budget: is no number")
    assert "... and 4 more" in err.getvalue()
    assert "\x1b" not in err.getvalue()


def test_an_error_as_json_names_the_sheets_to_choose_from() -> None:
    err = io.StringIO()
    Output(io.StringIO(), err, json=True).error(InputError("no header", params={"other_sheets": ["Data"]}))
    assert json.loads(err.getvalue())["error"]["sheets"] == ["Data"]


# --- text that came from outside ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Spring sale 春季 さくら é 🌱", "Spring sale 春季 さくら é 🌱"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\nb\tc", "a b c"),
        ("\u202etxt.exe", "\\u202etxt.exe"),
        ("\x9b31m", "\\x9b31m"),
        ("lone \ud800", "lone \\ud800"),
        (None, ""),
        (7, "7"),
    ],
)
def test_text_from_outside_cannot_steer_the_terminal(text: Any, shown: str) -> None:
    assert clean(text) == shown


def test_json_on_a_terminal_cannot_steer_it_either() -> None:
    text = "\x1b[2J \x7f \x9b31m \u202etxt.exe \u2028 \ud800 春季 🌱"
    out, err = io.StringIO(), io.StringIO()
    Output(out, err, json=True).document({"title": text})
    Output(out, err, json=True).error(InputError(text))
    assert json.loads(out.getvalue()) == {"title": text}
    assert json.loads(err.getvalue())["error"]["message"] == text
    for said in (out.getvalue(), err.getvalue()):
        assert all(c == "\n" or c.isprintable() for c in said)
        assert "春季 🌱" in said


def test_a_plain_table_is_aligned_by_width_on_the_screen_and_interprets_no_markup() -> None:
    out = io.StringIO()
    Output(out).table({"id": 0, "title": 1, "n": 2}, [(1, "[bold]春季[/bold]", 5), (22, "x", 6)])
    lines = out.getvalue().splitlines()
    assert lines[1] == "1   [bold]春季[/bold]  5"
    assert lines[2] == "22  x                  6"


@pytest.mark.parametrize("width", [80, 100])
def test_the_list_of_tasks_is_read_in_80_columns(width: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    url = f"sqlite:///{tmp_path / 'a.db'}"
    app = AsyncTask(environ={}, database_url=url, data_dir=str(tmp_path))

    @app.worker(name="enroll_product_in_promotion")
    def enroll(item: dict[str, Any]) -> None: ...

    titles = ["Spring sale of everything that is left over", "products_2026-11-22_final.xlsx", ""]
    for title in titles:
        app.submit(enroll, ({"sku": n} for n in range(1200)), title=title)
    app.close()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    assert run(["tasks", "--database-url", url], stdout=out) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert lines[0].split() == ["id", "state", "%", "rows", "not", "ok", "created", "task"]
    for task_id in (1, 2, 3):  # each figure stands whole on the line of its Task
        (line,) = [line for line in lines if line.startswith(f"{task_id} ")]
        assert re.match(rf"{task_id} +running +0 +1,200 +0 +\d\d-\d\d \d\d:\d\d  +enroll", line), line
    words = " ".join(" ".join(line[line.find("enroll") :] if "enroll" in line else line for line in lines).split())
    for title in titles:
        assert title in words


@pytest.mark.parametrize("broker", ["", "redis://127.0.0.1:1/0"])
@pytest.mark.parametrize(
    "words",
    ["tasks", "show 1", "watch 1", "report 1 -o a.csv", "set 1 parallel=5", "pause 1", "resume 1", "cancel 1", "retry 1",
     "queues list", "retries list", "scheduled list", "dead list", "processes list", "doctor"],
)  # fmt: skip
def test_a_command_that_looks_makes_no_database_in_the_wrong_folder(
    words: str, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ASYNCTASK_DATABASE_URL", raising=False)
    code, out, err = call(*words.split(), *(["--broker-url", broker] if broker else []), environ=os.environ)  # type: ignore[arg-type]
    assert (code, out) == (2, "")
    assert f"there is no database {tmp_path / 'asynctask.db'}" in err
    for way in ("--database-url", "ASYNCTASK_DATABASE_URL", "-A module:app", "asynctask db upgrade"):
        assert way in err
    assert list(tmp_path.iterdir()) == []


def test_what_there_is_one_of_is_not_said_as_many() -> None:
    assert count(1, "row") == "1 row"
    assert duration(0.04) == "under 1 s"


def test_with_json_nothing_but_the_document_is_written() -> None:
    out, err = io.StringIO(), io.StringIO()
    output = Output(out, err, json=True)
    output.line("text")
    output.table({"a": 0}, [(1,)])
    output.note("note")
    output.document({"a": "é"})
    assert json.loads(out.getvalue()) == {"a": "é"}
    assert err.getvalue() == ""


# --- progress ---


def test_a_watched_task_ends_0_only_if_every_row_was_accepted_and_finished() -> None:
    assert outcome(progress()) == 0
    assert outcome(progress(counts={"finish": 9, "failed": 1})) == 1
    assert outcome(progress(split={"state": "sealed", "planned": 11, "created": 10, "rejected": 1})) == 1
    assert outcome(progress(state="cancelled", counts={"finish": 0})) == 1
    assert outcome(progress(state="rejected", counts={"finish": 0})) == 1


class _Session:
    def __init__(self) -> None:
        self.out = Output(io.StringIO(), io.StringIO())


@pytest.mark.parametrize("argv", [("submit", __file__, "--worker", "w"), ("export", "w", "--shards", "[1]")])
def test_a_limit_of_watching_without_watching_is_refused(argv: tuple[str, ...]) -> None:
    code, _, err = call(*argv, "--timeout", "5")
    assert code == 2
    assert "--watch" in err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_limit_of_watching_is_a_number_of_seconds(seconds: str) -> None:
    code, _, err = call("watch", "7", "--timeout", seconds)
    assert code == 2
    assert "--timeout" in err


def test_a_database_that_is_away_does_not_make_the_limit_longer() -> None:
    session: Any = _Session()
    handle: Any = Handle(LedgerUnavailable("away"))
    with pytest.raises(LedgerUnavailable):
        follow(session, handle, timeout=0)


def test_watching_waits_out_a_database_that_is_away_and_says_so_once() -> None:
    session: Any = _Session()
    running = progress(state="running", done=False, counts={"finish": 5, "enqueue": 5}, poll_after_ms=1)
    handle: Any = Handle(running, LedgerUnavailable("restarting"), LedgerUnavailable("restarting"), running, progress())
    assert follow(session, handle)["done"]
    assert session.out._stderr.getvalue().count("connection lost") == 1
    assert "finish 10" in session.out._stdout.getvalue().splitlines()[-1]


def test_without_a_terminal_a_line_is_written_only_when_something_is_new() -> None:
    now = [0.0]
    out = io.StringIO()
    with Bars(Output(out), lambda: now[0]) as bars:
        for second in range(10):
            now[0] = second
            counts = {"finish": second // 5, "enqueue": 10 - second // 5}
            bars.show(progress(state="running", done=False, counts=counts))
        bars.show(progress())
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize(
    ("seconds", "said"), [(None, ""), (0, "0 s"), (59.4, "59 s"), (185, "3 min 5 s"), (7_800, "2 h 10 min")]
)
def test_a_duration_is_said_as_people_say_it(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_a_task_that_is_still_split_has_no_percentage_and_no_bar_over_100() -> None:
    early = progress(
        state="splitting",
        done=False,
        counts={"enqueue": 3},
        progress={"percent": None, "rate_per_s": None, "eta_s": None},
    )
    assert pace(early) == "splitting"
    assert summary(early).plain == "enqueue 3"


# --- small things ---


def test_the_address_of_a_page_is_one_that_a_browser_takes() -> None:
    assert address("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert address("::1", 80) == "http://[::1]:80"


def test_a_port_that_is_taken_is_told_with_what_to_do() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(Exception, match="--port"):
            free_port("127.0.0.1", holder.getsockname()[1])
    assert free_port("127.0.0.1", 0) > 0


def test_a_child_is_started_with_the_flags_that_are_given() -> None:
    words = child_argv("shop:app", "worker", {"processes": 1, "strict_queues": False, "queues": "a,3 b", "port": None})
    assert words[1:] == [
        "-m",
        "asynctask",
        "-A",
        "shop:app",
        "worker",
        "--processes",
        "1",
        "--no-strict-queues",
        "--queues",
        "a,3 b",
    ]


def test_a_priority_is_a_number_or_a_name() -> None:
    assert priority_value("17") == 17
    assert priority_value("admin-high") == priority_value("ADMIN_HIGH") == 120


# --- the demo's audit: each thing that it claims to see, it sees ---


class _Expected:
    rows = 4

    def disagreements(self, **_found: Any) -> list[str]:
        return []


def _audit(**changes: Any) -> list[str]:
    found: dict[str, Any] = {
        "counts": {"finish": 2, "failed": 1},
        "rejected": 1,
        "sheet": {4: "a", 5: "b", 6: "b", 7: "c"},
        "report": ReportRows({6: "failed", 7: "rejected"}, {6: "b", 7: "c"}, ()),
        "codes": ["a", "b"],
    } | changes
    state = progress(counts=found["counts"], split={"state": "sealed", "rejected": found["rejected"]})
    findings = audit_campaigns(state, found["sheet"], found["report"], found["codes"], _Expected())
    return [sentence for finding in findings for sentence in finding.contradictions]


def test_the_audit_is_content_when_everything_agrees() -> None:
    assert _audit() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": ["a"]},
        {"codes": ["a", "b", "c"]},
        {"counts": {"finish": 3, "failed": 1}},
        {"counts": {"finish": 2, "failed": 1, "cancelled": 1}},
        {"rejected": 0},
        {"report": ReportRows({6: "failed"}, {6: "b"}, ())},
        {"report": ReportRows({4: "failed", 7: "rejected"}, {4: "a", 7: "c"}, ())},
        {"report": ReportRows({6: "failed", 7: "rejected"}, {6: "x", 7: "c"}, ())},
        {"report": ReportRows({6: "failed", 7: "rejected"}, {6: "b", 7: "c"}, (7,))},
        {"sheet": {4: "a", 5: "b", 6: "b"}},
    ],
)
def test_the_audit_sees_each_way_of_being_wrong(changes: dict[str, Any]) -> None:
    assert _audit(**changes) != []


@pytest.mark.parametrize(
    ("counts", "said", "colour"),
    [
        ({"finish": 9}, "finished", "green"),
        ({"finish": 8, "error": 1}, "finished", "yellow"),
        ({"error": 8, "failed": 1}, "finished (nothing succeeded)", "red"),
    ],
)
def test_a_task_that_finished_without_a_success_does_not_look_like_one(
    counts: dict[str, int], said: str, colour: str
) -> None:
    ended = {"state": "finished", "state_reason": None, "counts": {"finish": 0, "failed": 0, "error": 0, **counts}}
    assert (state_of(ended), style_of(ended)) == (said, colour)
