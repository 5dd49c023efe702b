"""The application of the idle worker process, by the settings of its environment."""

from asynctask import AsyncTask

__all__ = ["app"]

app = AsyncTask()


@app.worker(name="job")
def job(item: dict[str, object]) -> None:
    """A job that does nothing."""
