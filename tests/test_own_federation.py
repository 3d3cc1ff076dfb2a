"""Own tasks and algorithms on a real federation of four unequal sites, which have installed and pinned the code themselves."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_federations import ENVIRONMENT, Running, assert_equal, command, free_port, rows

from fedbilevel.runs.folder import RunFolder
from fedbilevel.tasks.regularisation import Regularisation

pytestmark = [pytest.mark.federation, pytest.mark.slow]

DOCS = Path(__file__).parent.parent / "docs"
SITES = [f"clinic-{m}" for m in range(4)]
RUN = ["--rounds", "40", "--every", "10", "--knob", "lam=0.003"]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)


class Clinics:
    """Four sites with a CSV file each, and the researcher's own copies of the code and of all data, for comparison."""

    def __init__(self, folder):
        self.folder, self.research = folder / "f", folder / "research"
        self.research.mkdir()
        subprocess.run([sys.executable, "-c", blocks("new-task.md")[0]], check=True, cwd=self.research)
        (self.research / "mine.py").write_text(blocks("new-task.md")[1])
        (self.research / "mymethod.py").write_text(blocks("new-algorithm.md")[0])
        self.installed = folder / "installed"  # as pip would do at every participant
        (self.installed / "clinic_plugin").mkdir(parents=True)
        (self.installed / "clinic_plugin" / "__init__.py").write_text("from clinic_plugin.task import cleaning\n")
        (self.installed / "clinic_plugin" / "task.py").write_text(blocks("new-task.md")[1])
        (self.installed / "clinic_plugin-1.dist-info").mkdir()
        for name, content in {
            "METADATA": "Metadata-Version: 2.1\nName: clinic-plugin\nVersion: 1\n",
            "entry_points.txt": "[fedbilevel.tasks]\nclinic-cleaning = clinic_plugin.task:cleaning\n",
        }.items():
            (self.installed / "clinic_plugin-1.dist-info" / name).write_text(content)
        command("federation", "init", self.folder, "--sites", ",".join(SITES), "--port", free_port())
        for m, site in enumerate(SITES):
            own = self.folder / site / "own"
            (own / "data").mkdir(parents=True)
            shutil.copy(self.research / "clinics" / f"{m}.csv", own / "data")
            for file in ("mine.py", "mymethod.py"):
                shutil.copy(self.research / file, own)
            self.restore(site)

    def configure(self, site, **entries):
        file = self.folder / site / "local" / "site.toml"
        file.write_text("\n".join([f"{k} = {json.dumps(v)}" for k, v in entries.items()] + ["", "[trusted]", ""]))

    def restore(self, site):
        """The site runs both files as the researcher has them."""
        self.configure(site, task="cleaning", loader="task", data="../own/data")
        for file in ("mine.py", "mymethod.py"):
            shutil.copy(self.research / file, self.folder / site / "own")
            command("federation", "trust", self.folder / site, self.folder / site / "own" / file)

    def run(self, out, *arguments, **options):
        return command("run", *arguments, *RUN, "--federation", self.folder, "--out", out, cwd=self.research, **options)

    def simulate(self, out, *arguments):
        command("run", *arguments, *RUN, "--data", "clinics", "--out", out, cwd=self.research)
        return rows(out)


@pytest.fixture(scope="module")
def clinics(tmp_path_factory):
    made = Clinics(tmp_path_factory.mktemp("own"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "PYTHONPATH", f"{made.installed}:{ENVIRONMENT['PYTHONPATH']}")
        yield from serving(made)


def serving(made):
    """The same while its processes are running."""
    running = Running(made.folder, "server", *SITES)
    try:
        running.await_sites()
        made.log = running.log
        yield made
    finally:
        running.stop()


def test_an_own_task_with_an_own_algorithm_has_the_simulated_numbers(clinics, tmp_path):
    said = clinics.run(tmp_path / "deployed", "mine.py", "mymethod.py").stdout
    assert "rows of the sites: clinic-0 45 (weight 0.25), clinic-1 124 (weight 0.25)" in said
    found, expected = rows(tmp_path / "deployed"), clinics.simulate(tmp_path / "simulated", "mine.py", "mymethod.py")
    assert_equal(found, expected)
    assert found[0].keys() == expected[0].keys() >= {"accuracy"} and len(found) == 5


def test_sites_weigh_by_their_rows_as_in_the_simulation(clinics, tmp_path):
    said = clinics.run(tmp_path / "deployed", "mine.py", "simfbo", "--weights", "rows").stdout
    assert f"clinic-3 269 (weight {269 / 569:.3g})" in said
    found = rows(tmp_path / "deployed")
    assert_equal(found, clinics.simulate(tmp_path / "simulated", "mine.py", "simfbo", "--weights", "rows"))
    equal = clinics.simulate(tmp_path / "equal", "mine.py", "simfbo")
    assert abs(found[-1]["upper_loss"] - equal[-1]["upper_loss"]) > 1e-3
    clinics.run(tmp_path / "given", "mine.py", "simfbo", "--weights", "45,124,131,269")
    np.testing.assert_allclose([r["upper_loss"] for r in rows(tmp_path / "given")], [r["upper_loss"] for r in found], rtol=1e-6)


def test_an_installed_package_is_pinned_as_a_whole(clinics, tmp_path):
    helper = clinics.installed / "clinic_plugin" / "__init__.py"
    try:
        for site in SITES:
            clinics.configure(site, task="clinic-cleaning", loader="task", data="../own/data")
            assert "clinic-plugin" in command("federation", "trust", clinics.folder / site, "clinic-cleaning").stdout
        clinics.run(tmp_path / "deployed", "clinic-cleaning", "simfbo")
        assert_equal(rows(tmp_path / "deployed"), clinics.simulate(tmp_path / "simulated", "mine.py", "simfbo"))
        helper.write_text(helper.read_text() + "# changed\n")
        done = clinics.run(tmp_path / "refused", "clinic-cleaning", "simfbo", check=False)
        line = "this site has pinned no code with the SHA-256 of the run's task clinic-cleaning"
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and line in done.stderr
    finally:
        for site in SITES:
            clinics.restore(site)


def test_metrics_come_from_rows_that_the_sites_hold_out_or_are_left_out(clinics, tmp_path):
    """With fedbilevel's own task on the sites' own rows, in doubles; only two of the sites hold any out."""
    parts, held_out = Regularisation(clients=4).build().population, {}
    arguments = ["regularisation", "simfbo", "--rounds", "10", "--federation", clinics.folder, "--out"]
    try:
        for m, site in enumerate(SITES):
            part = parts.only(m)
            named = {"upper": part.upper.rows, "lower": part.lower.rows}
            arrays = {f"{w}_{k}": np.asarray(v, float) for w, own in named.items() for k, v in own._asdict().items()}
            held_out[site] = {k.replace("upper", "test"): v[: 4 * m + 2] for k, v in arrays.items() if "upper" in k and m % 2}
            np.savez(clinics.folder / site / "own" / "rows.npz", **arrays, **held_out[site])
            clinics.configure(site, task="regularisation", loader="files", path="../own/rows.npz")
        said = command("run", *arguments, tmp_path / "tested").stdout
        assert "note: From rows that the sites hold out, 20 in all: test_loss, test_accuracy." in said
        for site in SITES:
            file = clinics.folder / site / "own" / "rows.npz"
            np.savez(file, **{k: v for k, v in np.load(file).items() if not k.startswith("test")})
        said = command("run", *arguments, tmp_path / "without").stdout
    finally:
        for site in SITES:
            clinics.restore(site)
    lines = [line for line in said.splitlines() if line.startswith("note: Left out")]
    assert lines == [
        "note: Left out, since the server would compute them from data that is not the sites': test_accuracy, test_loss."
    ]
    without, tested = (rows(tmp_path / name) for name in ("without", "tested"))
    assert not {"test_loss", "test_accuracy"} & without[-1].keys()
    assert [row["upper_loss"] for row in without] == [row["upper_loss"] for row in tested]
    features, benign = (
        np.concatenate([held_out[s][f"test_{k}"] for s in (SITES[1], SITES[3])]) for k in ("features", "benign")
    )
    score = features @ RunFolder(tmp_path / "tested" / "simfbo").point()["y"]
    np.testing.assert_allclose(tested[-1]["test_accuracy"], np.mean((score > 0) == benign), rtol=1e-5)
    np.testing.assert_allclose(tested[-1]["test_loss"], np.mean(np.logaddexp(0, score) - benign * score), rtol=1e-5)


def test_code_that_is_not_as_pinned_is_refused_before_any_data_is_read(clinics, tmp_path):
    """One site has pinned nothing, one has another file now, one has lost it, and one was never set up for the task."""
    own = [clinics.folder / site / "own" for site in SITES]
    try:
        clinics.configure(SITES[0], task="cleaning", loader="task", data="../own/data")
        (own[1] / "mine.py").write_text((own[1] / "mine.py").read_text() + "\nopen('executed', 'w')\n")
        (own[2] / "mine.py").unlink()
        clinics.configure(SITES[3], task="other", loader="task", data="../own/data")
        for folder in own:
            (folder / "data").rename(folder / "away")  # who looks for data has another complaint
        done = clinics.run(tmp_path / "run", "mine.py", "simfbo", check=False)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "this site has pinned no code with the SHA-256 of the run's task cleaning" in done.stderr
        lines = [
            "this site has pinned no code with the SHA-256 of the run's task cleaning",
            "the code of the task cleaning has changed at this site since it was pinned",
            "the task cleaning is pinned at this site, but cannot be read there",
            "this site is set up for the task other, not for cleaning: refused",
        ]
        for site, line in zip(SITES, lines, strict=True):
            assert f"refused: {line}" in clinics.log(site) and f"{site}: {line}" in done.stdout
        assert not list(clinics.folder.rglob("executed"))
    finally:
        for site, folder in zip(SITES, own, strict=True):
            (folder / "away").rename(folder / "data")
            clinics.restore(site)
