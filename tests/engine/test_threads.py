"""Threads that are waited for when the interpreter exits."""

from __future__ import annotations

import subprocess
import sys

LOCAL = """
import sys, threading, time
from shardesd.engine.threads import start

class Buffer:
    def __del__(self):
        time.sleep(0.5)  # as what gives the interpreter's lock away does
        print("freed", flush=True)

local = threading.local()

def work():
    local.buffer = Buffer()
    done.set()

done = threading.Event()
start(work, "worker")
done.wait()
"""


def test_what_is_local_to_a_thread_is_freed_before_the_interpreter_goes() -> None:
    """Else a thread that is within torch then takes the process down, though its target is done."""
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "freed\n", "")
