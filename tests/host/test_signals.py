"""A signal for the main thread of a process reaches it, though the kernel would choose another thread."""

import ctypes
import signal
import subprocess
import sys

import pytest

from rankzero.host.processes import signal_main_thread

PROGRAM = """
import faulthandler, signal, sys, threading, time

def other():
    time.sleep(600)

number = signal.SIGUSR2
faulthandler.register(number, file=sys.stdout, all_threads=False)
thread = threading.Thread(target=other, daemon=True)
thread.start()
# As a main thread with a signal that waits for a processor: the kernel passes it over.
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
print("ready", flush=True)

def main_thread_stands_here():
    sys.stdin.readline()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    print("end", flush=True)

main_thread_stands_here()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "tgkill"), reason="the C library has no tgkill")
def test_a_signal_reaches_the_main_thread_and_no_other() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "ready\n"
        signal_main_thread(process.pid, signal.SIGUSR2)
        process.stdin.write("\n")
        process.stdin.flush()
        said = process.stdout.read()
    assert "main_thread_stands_here" in said
    assert "in other" not in said
