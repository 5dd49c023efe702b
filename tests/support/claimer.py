"""A process that claims and acknowledges until the queue is empty: ``claimer.py URL NAME BATCH [hold]``.

It prints a line for each batch before it acknowledges it. With ``hold`` it takes one batch in a transaction that is never
committed, says so and waits to be killed.
"""

from __future__ import annotations

import sys
import threading
from contextlib import closing

from asynctask.brokers.sql.broker import SqlBroker
from asynctask.database.engine import Database


def main() -> None:
    url, name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with closing(Database(url, pool_size=2)) as database, closing(SqlBroker(database)) as broker:
        if sys.argv[4:] == ["hold"]:
            with database.write() as connection:
                first = "(SELECT id FROM (SELECT id FROM jobs ORDER BY id LIMIT 10) AS d)"
                connection.exec_driver_sql(f"UPDATE jobs SET process = 'dead', waits = NULL WHERE id IN {first}")
                print("holds", flush=True)
                threading.Event().wait(120)
        done = broker.exchange(name, [], ["default"], batch)
        while done or broker.queues():  # what another has locked for a moment is passed over, and found later
            print("took", *(copy.jid for copy in done), flush=True)
            done = broker.exchange(name, done, ["default"], batch)
            if not done:
                broker.wait(0.05)


if __name__ == "__main__":
    main()
