"""The group commit outlives an outcome that the ledger can take in no form."""

from __future__ import annotations

from pathlib import Path

from support.databases import Store

from asynctask import AsyncTask
from asynctask.arrivals import ArrivalTracker
from asynctask.ledger.recorder import Recorder
from asynctask.ledger.standalone import Arrival
from asynctask.middleware.tracker import Attempt
from asynctask.testing import wait_for


def test_an_outcome_that_cannot_be_written_at_all_is_left_out_and_those_after_it_are_recorded(
    tmp_path: Path, store: Store
) -> None:
    app = AsyncTask(database_url=store.url, data_dir=str(tmp_path), environ={})
    recorder = Recorder(app.ledger)
    tracker = ArrivalTracker(app.ledger, recorder)
    broken, whole = map(Attempt, tracker.arrive([Arrival(name, None, "enrol", "default") for name in ("broken", "whole")]))
    with app.ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE events SET added_messages = 'no JSON' WHERE job_id = 'broken'")
    told: list[str] = []
    recorder.start()
    try:
        tracker.settle(broken, then=lambda won: told.append("broken"))
        wait_for(lambda: recorder.waiting == 0, "the broken one was tried")
        tracker.settle(whole, then=lambda won: told.append("whole"))
        wait_for(lambda: told, "the next outcome is recorded")
        assert app.event("whole")["status"] == "finish"
        assert told == ["whole"], "what is not recorded must not be acknowledged"
    finally:
        recorder.stop(5)
        app.close()
