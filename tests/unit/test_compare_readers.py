"""The script that compares readers of workbooks, on workbooks that both read and one that nobody can."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKBOOKS = ROOT / "tests/data/workbooks"


def test_readers_are_compared_cell_by_cell(tmp_path: Path) -> None:
    for name in ("merged_range.xlsx", "errors.xlsx", "special_cells.ods", "pass_protected.xlsx"):
        shutil.copy(WORKBOOKS / name, tmp_path)
    command = [sys.executable, str(ROOT / "scripts/compare_readers.py"), str(tmp_path), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    files = {Path(path).name: each for path, each in found["files"].items()}
    assert set(files["merged_range.xlsx"]) >= {"asynctask", "calamine", "openpyxl"}
    assert {each["rows"] for each in files["merged_range.xlsx"].values()} == {6}
    assert files["merged_range.xlsx"]["calamine"]["differ"] == files["merged_range.xlsx"]["openpyxl"]["differ"] == 0
    assert files["errors.xlsx"]["asynctask"]["rows"] == files["errors.xlsx"]["calamine"]["differ"] == 7
    assert files["special_cells.ods"]["calamine"]["differ"] == 2
    assert "password" in files["pass_protected.xlsx"]["asynctask"]["error"]
    assert found["sums"]["asynctask"]["failures"] == 1
    assert all(each["seconds"] > 0 and each["memory_mb"] > 0 for each in files["errors.xlsx"].values())
