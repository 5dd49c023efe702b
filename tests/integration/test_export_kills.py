"""A process that dies in the middle of a shard or of the merge: the result is whole or absent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.export_app import ROWS, add_export
from support.world import Started, World

from asynctask.errors import Conflict
from asynctask.testing import wait_for

LEASE = {"ASYNCTASK_LEASE_S": "1.0", "ASYNCTASK_HEARTBEAT_S": "0.3"}


def half_written(folder: Path, where: str) -> list[Path]:
    return [path for path in folder.glob(f"data/exports/{where}.tmp") if path.stat().st_size]


def killed(worker: Started) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()


@pytest.mark.one_database(reason="a file is whole or absent, whatever the database is")
def test_an_export_whose_workers_die_in_a_shard_and_in_the_merge_is_whole_or_absent(world: World) -> None:
    app = world.app(lease_s=1.0, heartbeat_s=0.3)
    add_export(app, world.folder)
    task = app.submit_export("numbers", [0, 1, 2])
    worker = world.cli("export_app", "worker", "-c", "1", **LEASE)
    wait_for(lambda: half_written(world.folder, "*/parts/.*"), "a shard is half written", 60)
    killed(worker)
    (world.folder / "shard-gate").touch()
    worker = world.cli("export_app", "worker", "-c", "1", **LEASE)
    wait_for(lambda: half_written(world.folder, "*/.*"), "the merge is half done", 60)
    assert task.progress()["state"] == "finalizing"
    killed(worker)
    with pytest.raises(Conflict, match="no result"):
        app.result(task.id)
    assert not list(world.folder.glob("data/exports/*/result-*"))
    with world.working(app):
        task.wait(timeout=120)
    path, manifest = Path(app.result(task.id).location), app.result(task.id).manifest
    assert path.read_bytes() == b"\xef\xbb\xbf" + b"".join(
        b"%s\r\n" % n for n in [b"n", *(b"%d" % n for n in range(3 * ROWS))]
    )
    assert (manifest["rows"], manifest["partial"], task.progress()["result"]["rows"]) == (3 * ROWS, False, 3 * ROWS)
    assert sorted(each.name for each in path.parent.iterdir()) == ["manifest-1.json", "result-1.csv"], "nothing lingers"
    assert app.doctor() == []
