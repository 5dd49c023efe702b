"""examples/shop passes its own tests, as its README says to run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_shop_passes_its_own_tests(tmp_path: Path) -> None:
    """In a copy: what they would leave behind is not in this checkout."""
    folder = shutil.copytree(
        ROOT / "examples/shop", tmp_path / "shop", ignore=shutil.ignore_patterns("__pycache__", "*.db")
    )
    before = {path for path in folder.rglob("*") if path.suffix != ".pyc"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:anyio"]
    command += ["-p", "asynctask.testing.plugin"]  # as its installation does
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert set(folder.rglob("*")) == before
