"""The public name of :mod:`asynctask.sidekiq.client`, a client that only pushes jobs, for workers of Sidekiq's format."""

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
