"""The parts of a worker process that other programs at its broker see."""

from __future__ import annotations

from asynctask.runtime.launcher import Launcher
from asynctask.sidekiq.fetcher import Fetcher
from asynctask.sidekiq.sharing import Poller, PresenceHeartbeat, Sharing


def sharing_of(launcher: Launcher) -> Sharing:
    """What a process does for other programs."""
    assert isinstance(launcher.hook, Sharing)
    return launcher.hook


def presence_of(launcher: Launcher) -> PresenceHeartbeat:
    """The heartbeat for Sidekiq's tools of a process with Redis."""
    found = sharing_of(launcher).heartbeat
    assert found is not None
    return found


def poller_of(launcher: Launcher) -> Poller:
    """The poller of a process with Redis."""
    found = sharing_of(launcher).poller
    assert found is not None
    return found


def fetcher_of(launcher: Launcher) -> Fetcher:
    """The fetcher of a process with Redis."""
    found = sharing_of(launcher).fetcher
    assert found is not None
    return found
