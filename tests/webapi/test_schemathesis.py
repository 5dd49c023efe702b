"""schemathesis, with every check of it, on a real server with workers: each operation, and operations one after another.

`schemathesis.toml` tells what it is run with. Here every run makes the same requests, so that what it finds is found again;
with API_SECONDS it goes on for so long, and `make test-api` does so for three minutes. There and in `make test-full` each
value is tried at its bounds, too: the phase ``coverage``, 3,900 requests and nine tenths of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from support.drawn import examples
from support.serving import PATIENCE_S, ROOT, Shop, answers, get

from asynctask.testing import wait_for

SECONDS = int(os.environ.get("API_SECONDS", "0"))
SEED = os.environ.get("API_SEED", "1")
PHASES = ["fuzzing", "stateful", *(["coverage"] if SECONDS else examples([], ["coverage"]))]
EXAMPLES = examples(2, 20)
"""Requests for each operation and phase, at most."""

MOST_S = 600
ITEMS = [{"sku": "A"}, {"sku": "NO-1"}, {"sku": "BUG-1"}, {"sku": 5.5}]


def test_schemathesis_finds_nothing_with_all_its_checks(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.open_gate(100)
    with shop.running("up", "--port", "0") as (_, said):
        url = said["url"].rstrip("/")
        wait_for(lambda: answers(f"{url}/readyz"), "the server to be ready")
        for worker in ("enroll", "gated"):
            body = json.dumps({"worker": worker, "items": ITEMS}).encode()
            asked = urllib.request.Request(f"{url}/api/tasks", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(asked, timeout=PATIENCE_S).close()
        wait_for(lambda: all(task["done"] for task in get(f"{url}/api/tasks")["tasks"]), "the Tasks to be over")
        how = ["--max-time", str(SECONDS)] if SECONDS else ["--max-examples", str(EXAMPLES), "--generation-deterministic"]
        found = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                "run",
                f"{url}/openapi.json",
                "--checks",
                "all",
                "--phases",
                ",".join(PHASES),
                *how,
                "--seed",
                SEED,
                "--no-color",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS + MOST_S,
        )
    assert found.returncode == 0, found.stdout[-20_000:]
    assert all(phase.title() in found.stdout for phase in PHASES)
