"""The short form of the long attack: every kind of fault hits once, and all promises hold; what it would miss is void."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_program
from support.servers import missing

from asynctask.testing.servers import MissingServer, find_program
from benchmarks import chaos, databases

ROOT = Path(__file__).resolve().parents[2]


def attack(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, whose temporary files are in ``folder``."""
    environ = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    return run_program(["benchmarks.chaos", *words], cwd=folder, env=environ, timeout=900)


def table(folder: Path, *words: str) -> dict[str, Any]:
    """The settings of a run in which all held."""
    done = attack(folder, "-n", "800", "--minutes", "0.1", *words, "--json")
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["name"], found["ours"], found["unit"]) == ("chaos", 0, "broken")
    settings: dict[str, Any] = found["settings"]
    assert settings["broken"] == settings["never_hit"] == []
    assert all(settings["table"]["faults"].values())
    assert settings["table"]["items lost"] == settings["table"]["outcomes recorded twice"] == 0
    assert not list(folder.iterdir()), "it leaves nothing behind"
    return settings


@pytest.mark.full(reason="a way of measuring; each fault alone is tested elsewhere")
def test_every_fault_hits_jobs_and_every_promise_holds_on_a_file(tmp_path: Path) -> None:
    settings = table(tmp_path, "--seed", "7")
    assert (settings["kind"], settings["broker"], settings["seed"]) == ("sqlite", "the database", 7)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the servers may enter: under root they run as another user, and pytest's own are closed to it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.full(reason="minutes; each fault alone is tested on each database elsewhere")
@pytest.mark.parametrize("words", [("postgresql", "--redis"), ("mariadb",)], ids=" ".join)
def test_every_fault_hits_jobs_and_every_promise_holds_on_servers(open_folder: Path, words: tuple[str, ...]) -> None:
    server = {"postgresql": ("postgres", "postgresql"), "mariadb": ("mariadbd", "mariadb-server")}[words[0]]
    try:
        find_program(*server)
        find_program("redis-server", "redis-server")
    except MissingServer:
        missing(*server)
    settings = table(open_folder, "--server", *words)
    assert {"database killed", "connections cut"} <= set(settings["table"]["faults"])


@pytest.mark.parametrize(
    ("words", "why"),
    [(["-n", "10"], "-n must be"), (["--minutes", "0"], "--minutes from"), (["--lease", "0"], "--lease must be")],
)
def test_what_could_hit_nothing_is_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        chaos.main(words)
    assert why in capsys.readouterr().err


def test_a_server_that_is_not_installed_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise databases.NotHere("not installed")

    monkeypatch.setattr(chaos, "arena", gone)
    assert chaos.main(["-n", "500"]) == 2
