"""The YAML file of ``-C``: what Sidekiq's files say is taken, the rest refused with how to mend it, nothing executed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynctask.cli.root import run
from asynctask.config import Config
from asynctask.errors import ConfigError, TooLarge
from asynctask.sidekiq.worker_file import MAX_ALIASES, MAX_FILE_BYTES, read_worker_file

Writes = Callable[[str | bytes], Path]


@pytest.fixture
def written(tmp_path: Path) -> Writes:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "config.yml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def said(path: Path, environment: str = "development") -> dict[str, Any]:
    return dict(read_worker_file(path, environment).settings)


# -- what Sidekiq's files say


SIDEKIQS = """
# as in Sidekiq's own example
:concurrency: 10
:timeout: 8
:poll_interval_average: 3
:dead_max_jobs: 500
:dead_timeout_in_seconds: 86400
:queues:
  - critical
  - default
production:
  :concurrency: 25
staging:
  concurrency: 15
  queues: [low]
"""


@pytest.mark.parametrize("text", [SIDEKIQS, SIDEKIQS.replace("\n:", "\n").replace("  :", "  ")], ids=["colons", "plain"])
def test_the_lines_of_sidekiqs_files_are_settings(written: Writes, text: str) -> None:
    common = {"shutdown_s": 8.0, "poll_interval_s": 3.0, "dead_max_jobs": 500, "dead_timeout_s": 86400}
    path = written(text)
    both = {**common, "queues": "critical default", "strict_queues": True}
    assert said(path) == {**both, "concurrency": 10}
    assert said(path, "production") == {**both, "concurrency": 25}
    assert said(path, "staging") == {**common, "concurrency": 15, "queues": "low", "strict_queues": True}


@pytest.mark.parametrize(
    ("queues", "weights", "in_order"),
    [
        ("[a, b]", {"a": 1, "b": 1}, True),
        ("[[a, 3], [b, 1]]", {"a": 3, "b": 1}, False),
        ("[[a, 3], b]", {"a": 3, "b": 1}, False),
        ("['a,3', 'b,0']", {"a": 3, "b": 1}, False),
        ("[[a, 0], [b, 0]]", {"a": 1, "b": 1}, True),
        ("{a: 2, b: 1}", {"a": 2, "b": 1}, False),
        ("\n  - :a\n  - ':b'", {"a": 1, "b": 1}, True),
        ("a,3 b", {"a": 3, "b": 1}, None),
    ],
)
def test_queues_are_written_as_sidekiq_writes_them(
    written: Writes, queues: str, weights: dict[str, int], in_order: bool | None
) -> None:
    found = said(written(f":queues: {queues}\n"))
    assert Config(**found).queue_weights() == weights
    assert found.get("strict_queues") is in_order


@pytest.mark.parametrize(("line", "strict"), [(":strict: false", False), ("strict_queues: true", True)])
def test_a_line_of_its_own_decides_about_the_order(written: Writes, line: str, strict: bool) -> None:
    assert said(written(f"{line}\nqueues: [[a, 2], b]\n"))["strict_queues"] is strict


def test_the_order_of_outside_does_not_outlive_its_queues(written: Writes) -> None:
    path = written("strict: true\nqueues: [a, b]\nproduction:\n  queues: [[c, 2], d]\n")
    assert said(path, "production") == {"queues": "c,2 d,1", "strict_queues": False}
    path = written("queues: [a, b]\nproduction:\n  queues: c,2 d\n")
    assert said(path, "production") == {"queues": "c,2 d"}


def test_our_own_settings_may_stand_there_by_their_names(written: Writes) -> None:
    path = written("processes: 3\nlease_s: 30\nbroker_url: redis://db/1\nstrict_queues: yes\n")
    assert said(path) == {"processes": 3, "lease_s": 30.0, "broker_url": "redis://db/1", "strict_queues": True}


def test_a_section_may_take_over_another_as_in_rails(written: Writes) -> None:
    path = written("base: &base\n  concurrency: 7\n  timeout: 9\nproduction:\n  <<: *base\n  timeout: 30\n")
    assert said(path, "production") == {"concurrency": 7, "shutdown_s": 30.0}


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "\ufeff# nothing\n"])
def test_an_empty_file_says_nothing(written: Writes, text: str) -> None:
    assert said(written(text)) == {}


def test_what_is_rubys_alone_is_passed_over_and_told(written: Writes) -> None:
    path = written(":require: ./app.rb\n:verbose: true\n:labels: [a]\nconcurrency: 2\n")
    found = read_worker_file(path, "development")
    assert (dict(found.settings), list(found.passed_over)) == ({"concurrency": 2}, ["labels", "require", "verbose"])


# -- what is refused


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("concurency: 5", "concurency is no setting (did you mean concurrency?)"),
        (":queue: [a]", "queue is no setting (did you mean queues?)"),
        ("production:\n  timeuot: 5", "production: timeuot is no setting (did you mean timeout?)"),
        ("colour: red\nconcurrency: 0", "colour is no setting; concurrency: concurrency must be between 1 and 1000"),
        ("concurrency: '5'", "concurrency must be int, not '5'"),
        ("concurrency: yes", "concurrency must be int, not True"),
        ("timeout: .nan", "must be a number"),
        ("timeout: .inf", "must be a number"),
        ("timeout: -1", "between 0 and 86400"),
        ("max_retries: 5", "say retry= where the worker is registered"),
        ("capsules:\n  one:\n    concurrency: 1", "run a worker for each capsule"),
        ("queues: []", "write a list of queues"),
        ("queues: 5", "write a list of queues"),
        ("queues: [a, a]", "stands there twice"),
        ("queues: [on]", "True is no name of a queue"),
        ("queues: [7]", "7 is no name of a queue"),
        ("queues: ['a b']", "'a b' is no name of a queue"),
        ("queues: [[a, 2, 3]]", "is no name of a queue"),
        ("queues: [[a, -1]]", "the weight of a must be a whole number"),
        ("queues: [[a, 1000000000]]", "the weight of a must be a whole number"),
        ("queues: ['a,x']", "the weight of a must be a whole number"),
        ("queues: 'a,x'\nprocesses: 1.5", "processes must be int, not 1.5"),
        ("concurrency: 1\n:concurrency: 2", "concurrency stands there twice"),
        ("timeout: 1\nshutdown_s: 2", "shutdown_s says again what another line says"),
        ("production:\n  staging:\n    timeout: 1", "production: staging is no setting"),
        ("5: a", "5 is no name of a setting"),
        ("- concurrency", "holds no settings"),
        ("just words", "holds no settings"),
        ("a: [", "line 1"),
        ("a: 1\n  b: 2", "line 2"),
        ("concurrency: 1\n---\nconcurrency: 2", "single document"),
        ("concurrency: !ruby/object:Object {}", "objects are not read from a file"),
        ("concurrency: !!python/object/apply:os.system ['true']", "objects are not read from a file"),
        ("concurrency: <%= ENV['THREADS'] %>", "holds Ruby code"),
        ("? [a, b]\n: 1", "line 1"),
        ("concurrency: 2026-13-77", "no YAML"),
        ("concurrency: " + "9" * 5_000, "no YAML"),
    ],
)
def test_a_line_that_cannot_be_is_told_with_how_to_mend_it(written: Writes, text: str, told: str) -> None:
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        said(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2_000


def bomb(levels: int) -> str:
    lines = ["a0: &a0 {concurrency: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(12),
        "a: &a [" + ",".join(["x"] * 9) + "]\n" + "\n".join(f"b{n}: [{', '.join(['*a'] * 9)}]" for n in range(3)),
        "queues: " + "[" * 5_000,
        "queues: " + "[" * 5_000 + "]" * 5_000,
        "queues: [" + "a," * 10_000 + "]",
    ],
    ids=["merges", "lists", "open", "deep", "long"],
)
def test_a_bomb_is_refused_before_it_goes_off(written: Writes, text: str) -> None:
    with pytest.raises(ConfigError, match="too large or too deep"):
        said(written(text))


def test_the_greatest_number_of_aliases_is_harmless(written: Writes) -> None:
    text = "base: &base\n  concurrency: 3\n" + "".join(f"s{n}:\n  <<: *base\n" for n in range(MAX_ALIASES))
    assert said(written(text), f"s{MAX_ALIASES - 1}") == {"concurrency": 3}


def test_an_endless_alias_ends(written: Writes) -> None:
    with pytest.raises(ConfigError, match="is no name of a queue"):
        said(written("queues: &q [*q]"))


def test_a_large_file_is_not_read(written: Writes) -> None:
    with pytest.raises(TooLarge, match="is no configuration"):
        said(written("#" * (MAX_FILE_BYTES + 1)))


def test_what_is_no_file_or_no_text_is_told(written: Writes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        said(tmp_path / "none.yml")
    with pytest.raises(ConfigError, match="cannot be read"):
        said(tmp_path)
    with pytest.raises(ConfigError, match="UTF-8"):
        said(written("concurrency: 1 # ü".encode("latin-1")))


# -- flags, file and environment


def config(*argv: str, environ: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """What ``asynctask config`` tells of each setting: its value and its origin."""
    out, err = io.StringIO(), io.StringIO()
    code = run(["config", "--json", *argv], stdout=out, stderr=err, environ={} if environ is None else environ)
    assert code == 0, err.getvalue()
    return {each["name"]: (each["value"], each["origin"]) for each in json.loads(out.getvalue())["settings"]}


def test_a_flag_wins_over_the_file_and_the_file_over_the_environment(written: Writes) -> None:
    path = str(written("concurrency: 7\nprocesses: 2\nqueues: [a, b]\n"))
    environ = {"ASYNCTASK_CONCURRENCY": "3", "ASYNCTASK_PROCESSES": "9", "ASYNCTASK_MAX_ROWS": "5"}
    for argv in (("--processes", "4", "-C", path), ("-C", path, "--processes", "4")):
        found = config(*argv, environ=environ)
        assert found["concurrency"] == (7, "file")
        assert found["processes"] == (4, "flag")
        assert found["max_rows"] == (5, "environment")
        assert (found["queues"], found["strict_queues"]) == (("a b", "file"), (True, "file"))
        assert found["locale"][1] == "default"


def test_queues_of_a_flag_bring_their_own_order(written: Writes) -> None:
    path = str(written("queues: [a, b]\n"))
    found = config("--queues", "c,2 d", "-C", path)
    assert (found["queues"], found["strict_queues"]) == (("c,2 d", "flag"), (False, "default"))


@pytest.mark.parametrize(
    ("environ", "argv", "concurrency"),
    [
        ({}, (), 1),
        ({"RAILS_ENV": "production"}, (), 2),
        ({"RACK_ENV": "production", "APP_ENV": "staging"}, (), 3),
        ({"RAILS_ENV": "production"}, ("-e", "staging"), 3),
        ({"RAILS_ENV": "test"}, (), 5),
    ],
)
def test_the_environment_chooses_the_section(
    written: Writes, environ: dict[str, str], argv: tuple[str, ...], concurrency: int
) -> None:
    text = "development: {concurrency: 1}\nproduction: {concurrency: 2}\nstaging: {concurrency: 3}\n"
    assert config("-C", str(written(text)), *argv, environ=environ)["concurrency"][0] == concurrency


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("-C", "FILE", "-e", "prod"), "it has no section 'prod'; there are: production"),
        (("-e", "production"), "name the file with -C"),
        (("-C", "none.yml"), "No such file"),
    ],
)
def test_a_call_that_cannot_be_ends_with_2(written: Writes, argv: tuple[str, ...], told: str) -> None:
    path = written("production: {concurrency: 2}\n")
    out, err = io.StringIO(), io.StringIO()
    words = [str(path) if word == "FILE" else word for word in argv]
    assert run(["worker", *words], stdout=out, stderr=err, environ={}) == 2
    assert (out.getvalue(), told in err.getvalue()) == ("", True), err.getvalue()


def test_a_value_that_the_application_fixes_is_told_as_that_of_the_file(
    written: Writes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixed_shop.py").write_text("from asynctask import AsyncTask\napp = AsyncTask(locale='ja')\n")
    monkeypatch.chdir(tmp_path)
    out, err = io.StringIO(), io.StringIO()
    path = written("locale: en\n")
    try:
        code = run(["-A", "fixed_shop.py:app", "config", "-C", str(path)], stdout=out, stderr=err, environ={})
    finally:
        sys.modules.pop("fixed_shop", None)
        sys.path[:] = [each for each in sys.path if each != str(tmp_path)]
    assert code == 2
    assert f"locale of {path} has no effect" in err.getvalue()


def test_without_the_library_it_is_told_how_to_install_it(written: Writes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    out, err = io.StringIO(), io.StringIO()
    assert run(["config", "-C", str(written("concurrency: 1\n"))], stdout=out, stderr=err, environ={}) == 2
    assert "pip install 'asynctask-ledger[yaml]'" in err.getvalue()
