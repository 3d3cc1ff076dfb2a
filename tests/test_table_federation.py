"""Tables on a real federation of four unequal sites: what is fitted to them and the run are those of the simulation."""

import shutil
import subprocess
from pathlib import Path

import pytest
from real_federations import COMMAND, ENVIRONMENT, Running, assert_equal, command, free_port, rows, until

import fedbilevel as fb

pytestmark = [pytest.mark.federation, pytest.mark.slow]

EXAMPLE = Path(__file__).parent.parent / "examples" / "clinic_tables.py"
SITES = [f"clinic-{m}" for m in range(4)]


@pytest.fixture(scope="module")
def clinics(tmp_path_factory):
    """Sites that have pinned the example and have a table each, and a folder with all tables, for comparison."""
    folder = tmp_path_factory.mktemp("clinics")
    kits, names = folder / "f", {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), EXAMPLE, "exec"), names)
    names["make_tables"](folder / "all")
    command("federation", "init", kits, "--sites", ",".join(SITES), "--port", free_port())
    for m, site in enumerate(SITES):
        shutil.copy(folder / "all" / f"{m}.csv", kits / site / "patients.csv")
        toml = kits / site / "local" / "site.toml"
        toml.write_text('task = "cleaning"\nloader = "table"\npath = "../patients.csv"\n\n[trusted]\n')
        command("federation", "trust", kits / site, EXAMPLE)
    running = Running(kits, "server", *SITES)
    try:
        running.await_sites()
        running.tables = folder / "all"
        yield running
    finally:
        running.stop()


def simulated(clinics, out, *options):
    command("run", EXAMPLE, "simfbo", *options, "--data", clinics.tables, "--out", out)
    return rows(out)


def test_the_fit_and_the_run_are_the_simulated_ones(clinics, tmp_path):
    options = ["--rounds", 40, "--weights", "rows"]
    command("run", EXAMPLE, "simfbo", *options, "--federation", clinics.folder, "--out", tmp_path / "deployed")
    assert_equal(rows(tmp_path / "deployed"), simulated(clinics, tmp_path / "simulated", *options))
    ours, theirs = (fb.load(tmp_path / name).preprocessing for name in ("deployed", "simulated"))
    assert ours == theirs and ours.training == [31, 86, 96, 184]


def test_a_run_on_tables_survives_kill_9_of_the_command(clinics, tmp_path):
    options, out = ["--rounds", "600", "--every", "50"], tmp_path / "deployed"
    words = [*COMMAND, "run", EXAMPLE, "simfbo", *options, "--federation", clinics.folder, "--out", out]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    until(lambda: (out / "simfbo/checkpoint").exists() and len(rows(out)) > 2, 120, "a checkpoint")
    process.kill()
    process.wait()
    command("resume", out)
    assert_equal(rows(out), simulated(clinics, tmp_path / "simulated", *options))


def test_a_wrong_cell_is_named_at_its_site_and_nowhere_else(clinics, tmp_path):
    file = clinics.folder / SITES[1] / "patients.csv"
    whole = file.read_text()
    first, second, *others = whole.splitlines()
    file.write_text("\n".join([first, "SECRET" + second[second.index(",") :], *others]))
    try:
        arguments = ["run", EXAMPLE, "simfbo", "--rounds", 40, "--federation", clinics.folder, "--out", tmp_path / "run"]
        done = command(*arguments, check=False)
    finally:
        file.write_text(whole)
    said = f"{SITES[1]}: this site could not load its data; its log says why"
    assert done.returncode == 2 and said in done.stderr and "SECRET" not in done.stdout + done.stderr + clinics.log()
    assert "patients.csv:2: column 'radius': 'SECRET' is not a number" in clinics.log(SITES[1])
