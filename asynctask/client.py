"""A client that only pushes jobs, for workers of Sidekiq's format: the public name of :mod:`asynctask.sidekiq.client`."""

from __future__ import annotations

from asynctask.sidekiq.client import (
    BATCH,
    GlobalId,
    ModuleName,
    Outgoing,
    RedisClient,
    RemoteWorker,
    RubyRange,
    Symbol,
    When,
)

__all__ = [
    "BATCH", "GlobalId", "ModuleName", "Outgoing", "RedisClient", "RemoteWorker", "RubyRange", "Symbol", "When",
]  # fmt: skip
