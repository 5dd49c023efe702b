"""A process that reads lists for a test: what would end or stop it ends nobody else.

One line of JSON with a path and a name comes in, one goes out: how many rows there were, or the code of the refusal, or the
traceback of what should not have happened. It takes no more than 700 MB, and half a minute for a list.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from pathlib import Path

from asynctask.errors import InputError
from asynctask.lists.readers import Limits
from asynctask.lists.readers.opening import open_source

SECONDS = 30
LIMITS = Limits(max_unzipped_bytes=100_000_000)


def too_slow(*_: object) -> None:
    """The alarm of a list that takes too long."""
    raise TimeoutError("the reader did not come to an end")


def answer(path: str, name: str) -> dict[str, object]:
    """What reading a list came to."""
    signal.alarm(SECONDS)
    try:
        with open_source(Path(path), name, limits=LIMITS) as source:
            rows = sum(1 for _ in source.rows())
            return {"rows": rows, "planned": source.planned, "format": source.format}
    except InputError as error:
        return {"code": error.code, "status": error.status}
    except BaseException:
        return {"raised": traceback.format_exc()}
    finally:
        signal.alarm(0)


def main() -> None:
    """Answer until nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_AS, (700_000_000, 700_000_000))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, too_slow)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
