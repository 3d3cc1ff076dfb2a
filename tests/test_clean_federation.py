"""`fedbilevel clean` on a real federation: each site has its list, as in a simulation, and the server totals and none of x."""

import shutil

import numpy as np
import pytest
from real_federations import Running, command, free_port, rows
from test_clean import WRONG, make_tables

import fedbilevel as fb
from fedbilevel.federation.site_store import RUNS

pytestmark = [pytest.mark.federation, pytest.mark.slow]

COLUMNS = ["--label", "diagnosis", "--checked", "seen twice", "--features", "level,smoker,noise", "--categories", "smoker"]
TOML = """task = "label-errors"
loader = "table"
path = "../patients.csv"

[knobs]
label = "diagnosis"
checked = "seen twice"
features = "level,smoker,noise"
categories = "smoker"
"""


def test_lists_stay_at_their_sites(tmp_path):
    kits, tables = tmp_path / "study", make_tables(tmp_path / "clinics")
    command("federation", "init", kits, "--sites", ",".join(WRONG), "--port", free_port())
    for site in WRONG:
        shutil.copy(tables / f"{site}.csv", kits / site / "patients.csv")
        (kits / site / "local" / "site.toml").write_text(TOML)
        for earlier in range(20):
            (kits / site / "clean" / str(earlier)).mkdir(parents=True)
    running = Running(kits, "server", *WRONG)
    try:
        running.await_sites()
        done = command("clean", *COLUMNS, "--rounds", 60, "--federation", kits, "--out", tmp_path / "deployed")
    finally:
        running.stop()
    command("clean", tables, *COLUMNS, "--rounds", 60, "--out", tmp_path / "simulated")
    assert "about 5 of 55 unchecked rows of all sites are suspected" in done.stdout
    ours, theirs = (rows(tmp_path / name) for name in ("deployed", "simulated"))
    for a, b in zip(ours, theirs, strict=True):
        assert all(a[name] == b[name] for name in ("step", "rounds", "floats_up", "floats_down", "bytes_up", "bytes_down"))
        names = [name for name in b if name != "seconds"]
        np.testing.assert_allclose([a[name] for name in names], [b[name] for name in names], rtol=1e-3, atol=1e-5)
    for site in WRONG:
        (mine,) = (kits / site / "clean").glob("*/suspects.csv")
        assert len(list((kits / site / "clean").iterdir())) == RUNS
        simulated = (tmp_path / "simulated" / "sites" / site / "suspects.csv").read_text().splitlines()
        assert [line.split(",")[:3] for line in mine.read_text().splitlines()] == [line.split(",")[:3] for line in simulated]
        assert (mine.parent / "page.html").exists() and len(simulated) == 1 + len(WRONG[site])
    assert not (tmp_path / "deployed/fedpace-own/x.npy").exists()
    assert fb.load(tmp_path / "deployed").x is None
    assert not list((kits / "server").rglob("suspects.csv"))
