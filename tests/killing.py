"""A command that is killed once it has written some rows of metrics."""

import signal
import subprocess
import time


def kill_after_rows(words, metrics, **options):
    """Start a command, and kill it with -9 when its file of metrics has more than three rows."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, **options)
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
