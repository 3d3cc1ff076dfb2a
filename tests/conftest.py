"""All tests run in double precision, compile fast rather than fast code, and share what they compiled."""

import atexit
import gc
import importlib.metadata
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # other versions may not know it, and abort
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers and subprocesses inherit it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="fedbilevel-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import signal
import sys
from pathlib import Path

import jax
import pytest

jax.config.update("jax_enable_x64", True)
gc.set_threshold(100_000, 50, 100)  # tracing makes many objects that stay: looking for garbage was a sixth of the tests' time
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedbilevel-state-")  # which code the user has allowed
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would what tests start


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    """Compiled programs take maps of memory, of which a process may have 65,530: beyond that, loading one is its end."""
    yield
    if MAPS.exists() and MAPS.read_text().count("\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _no_sudden_end():
    """The command lets a closed pipe end it, which must not outlast the tests that call it in this process."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command in this process, in an empty folder: (exit code, stdout, stderr)."""
    from fedbilevel.command import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no data set is there
    monkeypatch.delenv("FEDBILEVEL_DATA", raising=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedbilevel", *map(str, arguments)])
        code = 0
        try:
            main.main()
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return code, out, err

    return run
