"""The memory of every process of a run, from /proc: the highest that the kernel has seen of each, asked while it lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PARENT", "Memory", "peak_kb", "server_peak_mb"]

EVERY_S = 0.05
"""A process is asked so often; what it takes in its very last moment may be missed."""


PARENT = " (parent)"


class Memory:
    """Watches every process whose environment has ``mark``: those that a run starts, and whatever they start.

    A parent may be gone while its children live, but all of them inherit the environment. ``roots``: names of processes by
    their id. Others have the name of the nearest above them; end that of a root with :data:`PARENT` to tell it from them. A
    process that splits is called ``split``, one whose parent is gone ``orphan``.
    """

    def __init__(self, mark: str, roots: Mapping[int, str]) -> None:
        self._mark = mark.encode()
        self._roots = dict(roots)
        self._peaks: dict[str, int] = {}
        self._stop = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches while the block runs."""
        thread = threading.Thread(target=self._run, name="memory")
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def peaks_mb(self) -> dict[str, float]:
        """The peak of each, in MB of 1,048,576 bytes, by the name of the process."""
        return {name: round(kilobytes / 1024, 1) for name, kilobytes in sorted(self._peaks.items())}

    def _run(self) -> None:
        while True:
            last = self._stop.is_set()
            for pid, name in self._family().items():
                if (peak := peak_kb(pid)) is not None:
                    self._peaks[name] = max(peak, self._peaks.get(name, 0))
            if last:
                return
            self._stop.wait(EVERY_S)

    def _family(self) -> dict[int, str]:
        parents = dict(_parents())
        return {pid: self._name(pid, parents) for pid in parents if self._mark in _asked(pid, "environ")}

    def _name(self, pid: int, parents: Mapping[int, int]) -> str:
        if pid in self._roots:
            return self._roots[pid]
        if b"split-task" in _asked(pid, "cmdline").split(b"\0"):
            return "split"
        while pid in parents and pid not in self._roots:
            pid = parents[pid]
        return self._roots.get(pid, "orphan").removesuffix(PARENT)


def _asked(pid: int, what: str) -> bytes:
    """Nothing for a process that is gone, or somebody else's."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            yield int(entry.name), int(stat.rpartition(")")[2].split()[1])


def peak_kb(pid: int | str) -> int | None:
    """The most memory that a process (``self``: this one) has held, in KB of 1,024 bytes; None where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def server_peak_mb(pid: int) -> float:
    """The same of the largest process of a web server, its parent or the one that answers, in MB of 1,048,576 bytes."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return round(max(peak_kb(each) or 0 for each in (str(pid), *children)) / 1024, 1)
