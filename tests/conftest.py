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
from types import SimpleNamespace

import jax
import pytest

jax.config.update("jax_enable_x64", True)
gc.set_threshold(100_000, 50, 100)  # tracing makes many objects that stay: looking for garbage was a sixth of the tests' time
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedbilevel-state-")  # which code the user has allowed
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would what tests start


MAPS = Path("/proc/self/maps")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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


@pytest.fixture
def own_site(tmp_path, monkeypatch):
    """A site's part of a job, asked by the server; its kit is in the folder."""
    from fedbilevel.federation import site

    workspace = SimpleNamespace(get_root_dir=lambda: str(tmp_path))
    monkeypatch.setattr(site, "collab", SimpleNamespace(caller="server", workspace=workspace))
    monkeypatch.setattr(site, "keep_compiled", lambda kit: None)
    (tmp_path / "local").mkdir()
    here = site.Site()
    here.prepare()
    return here


@pytest.fixture(scope="session")
def browser():
    """Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: install Debian's package 'chromium' to test the page in it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Open an address: the page, what its console complained about, and what it asked the network for."""
    pages = []

    def opened(address, ready="#chart-test_accuracy .main-svg", **options):
        tab = browser.new_page(**options)
        pages.append(tab)
        complaints, requests = [], []
        tab.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(address)
        tab.wait_for_selector(ready)
        return tab, complaints, requests

    yield opened
    for tab in pages:
        tab.close()
