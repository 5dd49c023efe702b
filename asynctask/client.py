"""A client that only pushes: it needs the address of a Redis and nothing else, no database, no web server.

.. code-block:: python

    from asynctask.client import RedisClient

    with RedisClient("redis://127.0.0.1:6379/0") as client:
        hard = client.remote_worker("HardWorker", queue="low", retry=5)
        hard.perform_async(1, "two")
        hard.perform_in(60, 1, "two")
        hard.set(queue="critical").perform_bulk([n] for n in range(100_000))

The last four names are for arguments of ActiveJob's (``active_job=True``) that have no form of their own in Python.
"""

from __future__ import annotations

from asynctask.brokers.redis.client import RedisClient, RemoteWorker
from asynctask.wire.activejob import GlobalId, ModuleName, RubyRange, Symbol
from asynctask.wire.payload import When

__all__ = ["GlobalId", "ModuleName", "RedisClient", "RemoteWorker", "RubyRange", "Symbol", "When"]
