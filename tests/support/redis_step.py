"""A worker of one step: connects, does what its argument says, tells that it has, and waits to be killed."""

from __future__ import annotations

import sys

from asynctask.brokers.base import RETRY, SetEntry
from asynctask.sidekiq.broker import RedisBroker


def main(url: str, step: str) -> None:
    broker = RedisBroker(url)
    if step == "before the fetch":
        broker.holders()
    else:
        fetched = broker.exchange("dead", [], ["default"], 4)
        if step == "after an acknowledgement":
            broker.exchange("dead", fetched[:1], ["default"], 1)
        elif step == "after a give-back":
            broker.put_back("dead", fetched[:1])
        elif step == "after a retry was put off":
            broker.hold(RETRY, [SetEntry(fetched[0], 5)], process="dead")
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
