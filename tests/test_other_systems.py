"""The library and the command without what Windows lacks: fcntl, SIGHUP, SIGPIPE, sysconf, and folders that can be opened."""

import subprocess
import sys

WITHOUT = """
import asyncio, os, pkgutil, signal, sys  # asyncio is Python's own, which asks for sysconf where there is one
sys.modules["fcntl"] = None
for owner, name in ((signal, "SIGHUP"), (signal, "SIGPIPE"), (os, "sysconf")):
    delattr(owner, name)
opens = os.open
def no_folders(path, *arguments, **more):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return opens(path, *arguments, **more)
os.open = no_folders
"""
IMPORTS = """
import importlib, fedbilevel
for module in pkgutil.walk_packages(fedbilevel.__path__, "fedbilevel."):
    if not module.name.startswith(("fedbilevel.federation.", "fedbilevel.__main__", "fedbilevel.tasks.models.aten")):
        importlib.import_module(module.name)
"""
SOLVES = """
import jax.numpy as jnp
import fedbilevel as fb
def f(x, y, rows):
    return jnp.mean((y - rows) ** 2) + x**2
def g(x, y, rows):
    return jnp.mean((y - x) ** 2)
fb.solve(f, g, jnp.ones(()), jnp.zeros(()), lower=[jnp.ones(3)] * 2, algorithm="simfbo", rounds=20)
"""
RUNS = """
from fedbilevel.command.main import main
for line in ("run quadratic simfbo --rounds 20 --out here", "resume here", "report here",
             "sweep quadratic simfbo --grid gamma_x=0.1,0.2 --seeds 1 --rounds 5 --out swept"):
    sys.argv = ["fedbilevel", *line.split()]
    main()
"""


def test_everything_but_the_federation_does_without_what_only_unix_has(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + IMPORTS + SOLVES + RUNS], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here/simfbo/result.json").exists() and (tmp_path / "swept/best.toml").exists()
    assert (tmp_path / "report.html").exists()
