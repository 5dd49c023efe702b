"""Renews the leases of processes whose interpreter is held: ``python -m asynctask.runtime.renewer``, a supervisor's child.

It reads from its standard input, a line each time, the JSON list of the leases to renew from then on, and ends with it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from asynctask.database.engine import Database
from asynctask.ledger.processes import renew
from asynctask.logs import get_logger, log_to_stderr
from asynctask.runtime.supervisor import Lease

__all__ = ["Renewals"]

_EVERY: Final = 1 / 4
"""Share of the shortest lease between two renewals."""

_RETRY_S: Final = 0.5


class Renewals:
    """The leases that are renewed now, of one or more ledgers."""

    def __init__(self) -> None:
        self._leases: Sequence[Lease] = ()
        self._changed = threading.Event()
        self._databases: dict[str, Database] = {}
        self._log = get_logger("asynctask.renewer")

    def keep(self, leases: Sequence[Lease]) -> None:
        """From now on these are renewed, at once and then in time."""
        self._leases = leases
        self._changed.set()

    def run(self) -> None:
        """Renews them without end."""
        pause_s = 60.0
        while True:
            self._changed.wait(pause_s)
            self._changed.clear()
            pause_s = self.renew()

    def renew(self) -> float:
        """Renews each once; returns the seconds until it is time again."""
        if not self._leases:
            return 60.0
        together: dict[tuple[str, float], list[str]] = defaultdict(list)
        for lease in self._leases:
            together[lease.database_url, lease.lease_s].append(lease.identity)
        try:
            for (url, lease_s), identities in together.items():
                if url not in self._databases:
                    self._databases[url] = Database(url, pool_size=4)
                renew(self._databases[url], identities, lease_s=lease_s)
        except Exception as error:  # whatever it is: nobody else renews them
            self._log.warning("renewal_put_off", error=str(error))
            return _RETRY_S
        return min(lease_s for _, lease_s in together) * _EVERY


def main() -> None:
    """Runs until the standard input ends."""
    log_to_stderr()
    renewals = Renewals()
    threading.Thread(target=renewals.run, name="renewals", daemon=True).start()
    for line in sys.stdin:
        renewals.keep([Lease(**each) for each in json.loads(line)])
    os._exit(0)  # whatever the database keeps it waiting for


if __name__ == "__main__":
    main()
