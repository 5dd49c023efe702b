"""A worker that is killed while its receiver has a webhook: the receiver gets the same one again, and the Task is done."""

from __future__ import annotations

import base64
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cli_process import Desk
from support.databases import migrated_file

from asynctask.testing import wait_for


def test_a_delivery_whose_worker_is_killed_comes_again_under_its_id(tmp_path: Path) -> None:
    desk, got = Desk(tmp_path), list[str]()
    migrated_file(tmp_path / "asynctask.db")
    desk.environ |= {
        "ASYNCTASK_WEBHOOK_SECRET": "whsec_" + base64.b64encode(b"k" * 32).decode(),
        "ASYNCTASK_WEBHOOK_PRIVATE": "true",
        "ASYNCTASK_LEASE_S": "2",
        "ASYNCTASK_HEARTBEAT_S": "0.5",
    }

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(str(self.headers["webhook-id"]))
            if len(got) == 1:  # before the answer, so that no outcome is recorded
                for each in desk.json("processes")["processes"]:
                    os.kill(each["pid"], signal.SIGKILL)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f'{{"url": "http://127.0.0.1:{server.server_address[1]}/"}}'
        with desk.started("worker", "-p", 2):
            wait_for(lambda: desk.registered("worker") == 2, "the workers have registered")
            desk.table("list.csv", [("A", 1)])
            desk.run("submit", "list.csv", "--worker", "enrol", "--on-complete", url, "--watch")
            wait_for(lambda: len(got) >= 2, "the receiver has got it again")
            job = ("jobs", "--worker", "asynctask.webhook", "--status", "finish")
            wait_for(lambda: got[0] in [each["job_id"] for each in desk.json(*job)["jobs"]], "it is recorded", every=0.5)
        server.shutdown()
    assert len(set(got)) == 1
    wait_for(lambda: not desk.processes(), "the end of every process")
