"""/readyz says 200 only where what is handed in could be kept."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.hooks import noting
from support.webshop import build_app, client_of

from asynctask import AsyncTask
from asynctask.ledger import doctor


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 32 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def app(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncTask]:
    monkeypatch.setattr(doctor, "FRESH_S", 0.0)
    found = build_app(small_disk)
    yield found
    found.close()


def fill(folder: Path, left: int) -> Path:
    """Leaves so many bytes of a file system."""
    free = os.statvfs(folder)
    path = folder / "filler"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - left)
    return path


def test_a_file_system_without_its_reserve_is_not_ready(app: AsyncTask, small_disk: Path) -> None:
    client = client_of(app)
    assert client.get("/readyz").status_code == 200
    filler = fill(small_disk, left=2**20)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.content_type) == (503, "application/problem+json")
    assert answer.json["code"] == "not_writable"
    assert answer.json["detail"] == "the file system of data_dir has 1.0 MB left, less than 16 MB"
    assert client.get("/healthz").status_code == 200
    filler.unlink()
    assert client.get("/readyz").status_code == 200


def test_a_write_that_fails_for_a_full_disk_is_not_ready(
    app: AsyncTask, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "RESERVE_BYTES", 0)
    client = client_of(app)
    assert client.get("/readyz").status_code == 200
    with closing(sqlite3.connect(small_disk / "ledger.db")) as connection:  # what the log has already it need not ask for
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    filler = fill(small_disk, left=0)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json["code"]) == (503, "not_writable")
    assert answer.json["detail"] == "the database takes no write; the log says why"
    filler.unlink()
    assert client.get("/readyz").status_code == 200


def test_who_asks_all_the_time_does_not_write_all_the_time(app: AsyncTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FRESH_S", 3600.0)
    looks: list[Any] = []
    monkeypatch.setattr(doctor.Readiness, "_write", noting(looks, doctor.Readiness._write))
    client = client_of(app)
    assert {client.get("/readyz").status_code for _ in range(5)} == {200}
    assert len(looks) == 1
