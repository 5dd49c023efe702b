"""A worker process whose jobs add to their own open Task. ``KILL``: on which side of the commit of an addition it kills
itself, ``before`` or ``after``; ``never``: on none."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from support.world import MARK, make_app, numbers

from asynctask import AsyncTask, current_job
from asynctask.ledger import additions


def add_found(app: AsyncTask) -> None:
    """Adds the worker ``found``: the item 0 adds three others."""

    @app.worker(retry=0)
    def found(item: dict[str, Any]) -> None:
        job = current_job()
        assert job.task is not None
        if item["n"] == 0:
            app.task(job.task.id).add(numbers(3, 1), idempotency_key=job.job_id)


def main() -> None:
    """The process."""
    app, inner = make_app(Path(os.environ[MARK])), additions.add
    add_found(app)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    def add(*args: Any, **kwargs: Any) -> Any:
        if os.environ["KILL"] == "before":
            die()
        answer = inner(*args, **kwargs)
        if os.environ["KILL"] == "after":
            die()
        return answer

    additions.add = add
    app.launcher(concurrency=1).run()


if __name__ == "__main__":
    main()
