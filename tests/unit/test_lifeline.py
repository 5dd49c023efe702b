"""What ties a supervisor and its children together, and the event that a signal handler may set."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing

from asynctask.supervisor import PULSE, Pulse, Wakeup

IN_ITS_OWN_WAIT = """
import os, signal, sys, threading
from asynctask.supervisor import Wakeup

wakeup = Wakeup()
signal.signal(signal.SIGTERM, lambda number, frame: wakeup.set())

def again(frame, event, argument):
    # A signal at every line that the main thread runs while it waits, in the code of the event itself.
    if event == "line":
        sys.settrace(None)
        frame.f_trace = None
        os.kill(os.getpid(), signal.SIGTERM)
    return again

lines = 0
for _ in range(50):
    sys.settrace(again)
    assert wakeup.wait(0)
    wakeup._set = False
sys.settrace(None)
print("never stuck")
"""


def test_a_handler_that_comes_in_the_middle_of_the_wait_ends_it() -> None:
    done = subprocess.run([sys.executable, "-c", IN_ITS_OWN_WAIT], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "never stuck", done.stderr


def test_a_notification_before_the_wait_is_not_lost_and_ends_one_wait_only() -> None:
    with closing(Wakeup()) as wakeup:
        wakeup.notify()
        assert not wakeup.wait(120), "it ended at once, and is not set"
        threading.Timer(0.0, wakeup.set).start()
        assert wakeup.wait(120)
        assert wakeup.wait(120), "once set, it stays set"


def test_setting_it_after_it_was_closed_touches_no_other_file() -> None:
    wakeup = Wakeup()
    wakeup.close()
    read, write = os.pipe()  # which have its numbers now
    wakeup.set()
    os.set_blocking(read, False)
    try:
        assert os.read(read, 1) == b""
    except BlockingIOError:
        pass
    finally:
        os.close(read)
        os.close(write)


def test_a_pulse_is_lines_and_never_blocks_or_breaks_its_process() -> None:
    read, write = os.pipe()
    pulse = Pulse({PULSE: str(write)})
    pulse.registered("host:1:abc", "sqlite:////tmp/a.db", 20.0)
    pulse.beat()
    first, second, rest = os.read(read, 65_536).split(b"\n")
    assert b'"identity": "host:1:abc"' in first
    assert (second, rest) == (b"", b"")
    for _ in range(70_000):  # more than a pipe takes
        pulse.beat()
    os.close(read)
    pulse.beat()
    os.close(write)
    Pulse({}).beat()
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
