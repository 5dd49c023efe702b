"""The parts of a worker process that other programs at its broker see."""

from __future__ import annotations

from asynctask.runtime.launcher import Launcher
from asynctask.sidekiq.fetcher import Fetcher
from asynctask.sidekiq.sharing import Poller, PresenceHeartbeat, Sharing


def presence_of(launcher: Launcher) -> PresenceHeartbeat:
    """The heartbeat for Sidekiq's tools of a process with Redis."""
    assert isinstance(launcher.hook, Sharing)
    assert launcher.hook.heartbeat is not None
    return launcher.hook.heartbeat


def poller_of(launcher: Launcher) -> Poller:
    """The poller of a process with Redis."""
    assert isinstance(launcher.hook, Sharing)
    assert launcher.hook.poller is not None
    return launcher.hook.poller


def fetcher_of(launcher: Launcher) -> Fetcher:
    """The fetcher of a process with Redis."""
    assert isinstance(launcher.hook, Sharing)
    assert launcher.hook.fetcher is not None
    return launcher.hook.fetcher
