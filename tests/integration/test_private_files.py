"""Who may read what AsyncTask writes on a machine: its own user, whatever the umask allows."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.world import World

from asynctask import AsyncTask
from asynctask.cli.serve import warn_if_readable
from asynctask.errors import Conflict, InputError

pytestmark = pytest.mark.databases("sqlite", reason="the other databases keep no files of ours")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_all_files_are_for_this_user_alone_whatever_the_umask(world: World) -> None:
    folder = world.folder / "new"
    folder.mkdir()
    with umask(0):
        app = AsyncTask(environ={}, database_url=f"sqlite:///{folder / 'a.db'}", data_dir=str(folder / "x/data"))

        @app.export(columns=["n"], name="counted")
        def counted(shard: int) -> Iterator[list[int]]:
            yield [shard]

        @app.worker
        def take(item: dict[str, Any]) -> None: ...

        try:
            app.ensure_schema()
            app.submit_file(take, app.uploads.store(io.BytesIO(b"n\n1\n"), "a.csv"))
            export = app.submit_export(counted, [1, 2], format="xlsx")
            with world.working(app):
                export.wait(timeout=60)
            found = {str(path.relative_to(folder)): mode_of(path) for path in folder.rglob("*")}
        finally:
            app.close()
    places = {name.partition("/")[0] for name in found}
    assert {"a.db", "a.db-wal", "a.db-shm", "a.db.lock", "x"} <= places
    kinds = {Path(name).name.partition("-")[0] for name in found}
    assert {"uploads", "exports", "result", "manifest"} <= kinds, found
    assert {oct(mode) for name, mode in found.items() if (folder / name).is_dir()} == {"0o700"}
    files = {name: oct(mode) for name, mode in found.items() if not (folder / name).is_dir()}
    assert set(files.values()) == {"0o600"}, files


@pytest.mark.parametrize("name", ["../ledger.db", "/etc/passwd", "..", "", "a\0b"])
def test_a_name_in_the_ledger_leads_to_no_file_outside(world: World, name: str) -> None:
    app = world.app()
    with pytest.raises(InputError):
        app.uploads.find(name)
    assert not app.uploads.remove(name)
    with pytest.raises(Conflict):
        app.export_files.result(name, 1)
    with pytest.raises(Conflict):
        app.export_files.remove(name)


def test_what_is_there_keeps_its_mode_and_a_start_warns_of_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    data, database = world.folder / "da ta", world.folder / "b.db"
    with umask(0o022):
        data.mkdir()
        database.touch()
    app = AsyncTask(environ={}, database_url=f"sqlite:///{database}", data_dir=str(data))
    app.ensure_schema()
    app.close()
    assert (mode_of(data), mode_of(database)) == (0o755, 0o644)
    warn_if_readable(data, database)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"WARNING: every user of this machine can read {data}. To end that: chmod -R go= '{data}'"
    assert second == f"WARNING: every user of this machine can read {database}. To end that: chmod go= {database}*"
    data.chmod(0o750)
    database.chmod(0o600)
    warn_if_readable(data, database)
    warn_if_readable(world.folder / "none", None)
    assert capsys.readouterr().err == ""
