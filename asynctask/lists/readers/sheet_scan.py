"""The sheets of an Excel workbook by name."""

from __future__ import annotations

from asynctask.lists.readers.workbook import SheetPart, sheet_parts

__all__ = ["SheetPart", "sheet_parts"]
