"""Reads lists of every known format; :func:`asynctask.lists.readers.opening.open_source` opens one."""

from __future__ import annotations

from asynctask.lists.readers.base import CellError, Limits, RawRow, Source

__all__ = ["CellError", "Limits", "RawRow", "Source"]
