"""An application all of whose texts are an attack on the page that shows them."""

from __future__ import annotations

from pydantic import BaseModel, Field

from asynctask import AsyncTask, NormalException

EVIL = "\"'><img src=x onerror=alert(1)><script>alert(2)</script><svg onload=alert(3)>{{7*7}}"
NAME = "\"'><img src=x onerror=alert(4)>"
"""The same as a name of a worker, which stands in paths."""

app = AsyncTask()


class Hostile(BaseModel):
    sku: str = Field(max_length=200, title=f"Sku {EVIL}", description=EVIL)
    note: str = Field("", title=f"Note {EVIL}")


def refuse(item: Hostile) -> dict[str, str]:
    if item.sku.startswith("NO"):
        raise NormalException(f"{EVIL} {item.note}")
    if item.sku.startswith("BUG"):
        raise RuntimeError(f"{EVIL} {item.sku}")
    return {EVIL: EVIL}


refuse.__doc__ = EVIL
refusing = app.worker(name=NAME, retry=0, search=["sku"])(refuse)
app.every(86_400, refusing, name=NAME, items=lambda _: [{"sku": EVIL}])


@app.worker(retry=2, use_task_event=False, retry_in=lambda *_: 3_600)
def again(text: str) -> None:
    raise RuntimeError(f"{EVIL} {text}")


@app.worker(retry=0, use_task_event=False)
def dies(text: str) -> None:
    raise RuntimeError(f"{EVIL} {text}")
