"""A task's clients' data where only some of it is here, rows of other types, weights by rows, and rows that are held out."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed

import fedbilevel as fb
from fedbilevel.core.client_lists import converted
from fedbilevel.core.participation import Everyone
from fedbilevel.core.population import MOST_ROWS
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.federation.begin_message import Holdings
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.sites_data import SitesData
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.client_data import ClientData, built
from fedbilevel.tasks.regularisation import Regularisation
from fedbilevel.user_files import decoded

SIZES, TABLES = [9, 14, 24], ClientData("tables")


def read(file):
    return np.loadtxt(file, delimiter=",")


def places(data, shared=False):
    """A place in x for each lower row; the second half of a table is for f, and of that the last third is held out."""
    tables = data.each("*.csv", read, row=np.zeros(3))
    cuts = [len(t) // 2 for t in tables]
    ends = [len(t) - len(t) // 6 for t in tables]
    own = np.split(np.arange(sum(cuts)), np.cumsum(cuts)[:-1])
    center = np.concatenate(tables).mean(0) if shared else np.zeros(3)

    def f(x, y, rows):
        return jnp.mean((rows @ y - 1) ** 2)

    def g(x, y, rows):
        return jnp.mean(jax.nn.sigmoid(x[rows["place"]]) * (rows["a"] @ y - 1) ** 2) + 0.1 * (y @ y)

    lower = [{"a": t[:n] - center, "place": p} for t, n, p in zip(tables, cuts, own, strict=True)]
    upper = [t[n:e] for t, n, e in zip(tables, cuts, ends, strict=True)]
    size = {"largest": lambda x, y, rows: jnp.abs(rows).max(axis=1).mean()}
    test = [t[e:] for t, e in zip(tables, ends, strict=True)]
    x0, y0 = jnp.zeros(sum(cuts)), jnp.zeros(3)
    return fb.Task.of(f, g, x0, y0, lower=lower, upper=upper, test=test, row_metrics=size, metrics=lambda x, y: {"far": x @ x})


@fb.task
def honest(data: fb.ClientData = TABLES) -> fb.Task:
    """Each client's rows are its own."""
    return places(data)


@fb.task
def mixing(data: fb.ClientData = TABLES) -> fb.Task:
    """Rows are centred by the mean of all clients'."""
    return places(data, shared=True)


@pytest.fixture
def tables(tmp_path):
    """A folder with all tables, and one for each client."""
    rng = np.random.default_rng(0)
    for m, n in enumerate(SIZES):
        (tmp_path / f"site-{m}").mkdir()
        (tmp_path / "all").mkdir(exist_ok=True)
        table = rng.standard_normal((n, 3))
        for folder in ("all", f"site-{m}"):
            np.savetxt(tmp_path / folder / f"{m}.csv", table, delimiter=",")
    return tmp_path


def leaves(population):
    return jax.tree.leaves((population.upper, population.lower, population.test))


def test_a_site_and_the_server_build_the_simulated_task_but_for_rows_that_are_elsewhere(tables):
    whole = honest().build(str(tables / "all"))
    counts = tuple((n,) for n in SIZES)
    server = built(honest(), ClientData("nowhere", counts))
    assert [a.shape for a in leaves(server.population)] == [a.shape for a in leaves(whole.population)]
    np.testing.assert_array_equal(server.x, whole.x)
    assert server.declared.found == (0,)
    site = built(honest(), ClientData(str(tables / "site-1"), counts, 1))
    assert site.declared.found == (SIZES[1],)
    for mine, theirs in zip(leaves(site.population.only(1)), leaves(whole.population.only(1)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_would_depend_on_rows_that_are_elsewhere_is_refused(tables):
    with pytest.raises(InputError, match="mixing: rows must not depend on the rows of other clients"):
        built(mixing(), ClientData(str(tables / "site-1"), ((), (), ()), 1))
    assert mixing().build(str(tables / "all")).population.size == 3  # where all are here they may


@pytest.mark.parametrize(
    ("folder", "here", "row", "message"),
    [
        ("nowhere", 1, np.zeros(3), r"there is no file \*.csv in the folder .*nowhere"),
        ("all", 1, np.zeros(3), "has 3 files .*, and a site is one client"),
        ("site-1", 1, np.zeros(4), r"has rows of shape \[3\], and the task's have \[4\]"),
        ("site-1", 1, np.zeros(3, int), "which int64, the type of the task's rows, cannot"),
    ],
)
def test_files_that_do_not_fit_are_named(tables, folder, here, row, message):
    with pytest.raises(InputError, match=message):
        ClientData(str(tables / folder), ((), ()), here).each("*.csv", read, row)


@pytest.mark.parametrize(
    ("rows", "dtype", "fits"),
    [
        (np.int64([0, 2**31 - 1]), "int32", True),
        (np.int64([0, 2**31]), "int32", False),
        (np.int64([-1]), "uint8", False),
        (np.uint64([2**63]), "int64", False),
        (np.float64([0, 1, 3]), "int32", True),
        (np.float64([0.5]), "int32", False),
        (np.float64([np.nan]), "int32", False),
        (np.float64([0.1, 1e-300]), "float32", True),
        (np.float64([1e300]), "float32", False),
        (np.int64([2**24]), "float32", True),
        (np.int64([2**24 + 1]), "float32", False),
        (np.array([True, False]), "float32", True),
        (np.int64([0, 1]), "bool", True),
        (np.int64([2]), "bool", False),
        (np.array(["1"]), "int32", False),
        (np.complex64([1]), "float32", False),
    ],
)
def test_types_are_converted_where_that_loses_nothing_but_digits(rows, dtype, fits):
    if not fits:
        with pytest.raises(InputError, match=r"it holds .* task's rows"):
            converted("it", rows, np.dtype(dtype))
        return
    made = converted("it", rows, np.dtype(dtype))
    assert made.dtype == dtype
    np.testing.assert_allclose(made, rows.astype(float), rtol=1e-7, atol=1e-38)


def test_weights_by_rows_are_those_of_all_rows_of_both_losses(tables):
    task = honest().build(str(tables / "all"))
    plain = simulation(task, fb.SimFBO(), rounds=2)
    rows = np.asarray(task.population.upper.size + task.population.lower.size, float)
    for how, wanted in (("rows", rows), ("equal", np.ones(3)), ("2,1,1", [2, 1, 1])):
        population = task.population.weighted(how)
        np.testing.assert_allclose(population.weights, np.divide(wanted, np.sum(wanted)), rtol=1e-12)
        assert population.equal_weights == (how == "equal")
    by_rows = dataclasses.replace(task, population=task.population.weighted("rows"))
    losses = [float(t.evaluate(t.x, t.y + 1)["upper_loss"]) for t in (task, by_rows)]
    each = [float(t.evaluate(t.x, t.y + 1)["upper_loss"]) for t in (_only(task, m) for m in range(3))]
    np.testing.assert_allclose(losses, [np.mean(each), rows / rows.sum() @ each], rtol=1e-12)
    assert plain.options.weights is None


def _only(task, m):
    return dataclasses.replace(task, population=task.population.only(m))


def test_a_run_that_says_nothing_of_weights_is_described_as_before_there_was_a_choice():
    plain = Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=5))
    rows = Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=5, weights="rows"))
    assert "weights" not in plain.plain() and rows.plain()["weights"] == "rows"
    assert Configuration.read(plain.plain()) == plain and Configuration.read(rows.plain()) == rows


def test_metrics_on_held_out_rows_are_means_over_all_of_them_in_both_engines(tables):
    task = honest().build(str(tables / "all"))
    x, y = task.x + 0.3, task.y + 0.7
    rows = np.concatenate([np.loadtxt(tables / "all" / f"{m}.csv", delimiter=",")[-(n // 6) :] for m, n in enumerate(SIZES)])
    wanted = {"test_loss": np.mean((rows @ np.asarray(y) - 1) ** 2), "test_largest": np.abs(rows).max(1).mean()}
    found = task.evaluate(x, y)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12)
    engine, _ = deployed(fb.FedAvg(), task.population, Everyone(), (task.x, task.y))
    state = fb.Pair(x, y)
    apart, together = engine.evaluate(task, state), SimulatedEngine(task.population, Everyone()).evaluate(task, state)
    assert apart.keys() - {"absences"} == together.keys() > wanted.keys() | {"upper_loss", "largest", "far"}
    for name, value in together.items():
        np.testing.assert_allclose(apart[name], value, rtol=1e-12)


def sites_data(tmp_path, *said):
    data = SitesData(tmp_path / "sites.json", ["a", "b"])
    data.add(dict(enumerate(said)))
    return data


SIMULATED, OWN, TESTED = Holdings(True, 5, 6), Holdings(False, 20, 10), Holdings(False, 20, 10, 4)


def test_the_servers_own_data_gives_metrics_only_if_all_data_is_simulated(tmp_path):
    task = Regularisation(clients=2).build()
    assert sites_data(tmp_path, SIMULATED, SIMULATED).measurable(task) is task
    for said, lost, held in (((SIMULATED, OWN), True, False), ((OWN,), True, False), ((OWN, TESTED), False, True)):
        (tmp_path / "sites.json").unlink()
        made = sites_data(tmp_path, *said).measurable(task)
        assert made.metrics(task.x, task.y) == {}
        notes = " ".join(made.notes)
        assert ("Left out" in notes) == lost and ("From rows that the sites hold out, 4 in all" in notes) == held
        assert "test_loss" in notes and "test_accuracy" in notes


def test_what_a_site_said_first_is_what_its_weight_comes_from(tmp_path):
    sites_data(tmp_path, SIMULATED, OWN)
    later = sites_data(tmp_path, Holdings(False, 500, 500))
    assert json.loads((tmp_path / "sites.json").read_text())["a"] == {
        **dataclasses.asdict(SIMULATED),
        "simulated": False,
        "found": [],
    }
    population = later.by_rows(Regularisation(clients=2).build().population)
    np.testing.assert_allclose(population.weights, [11 / 41, 30 / 41])
    line = later.line(population.weights.tolist())
    assert line == "rows of the sites: a 11 (weight 0.268), b 30 (weight 0.732)"


@pytest.mark.parametrize("rows", [-1, 0, MOST_ROWS + 1, 10**9, 10**30, 1.5, "9"])
def test_a_site_cannot_say_that_it_has_any_number_of_rows(rows):
    with pytest.raises(InputError):
        decoded(json.dumps({"simulated": False, "upper": 3, "lower": rows}).encode(), Holdings)


def site(folder, **entries):
    (folder / "site.toml").write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in entries.items()))
    return SiteData.read(folder / "site.toml")


def test_a_site_reads_its_own_file_through_the_task(tables):
    own = site(tables / "site-1", task="honest", loader="task", data=".")
    whole = honest().build(str(tables / "all")).population.only(1)
    _, mine = own.load(honest(), 1, [(n,) for n in SIZES])
    for found, wanted in zip(leaves(mine), leaves(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(InputError, match=r"this site's file had \(13,\) rows when the run began, and now has \(14,\)"):
        own.load(honest(), 1, [(9,), (13,), (24,)])
    with pytest.raises(InputError, match="data must name the folder of this site's file"):
        site(tables, task="honest", loader="task").load(honest(), 1, [(), (), ()])


def test_held_out_rows_can_come_from_files(tmp_path):
    part = Regularisation(clients=2).build().population.only(0)
    arrays = {
        f"{w}_{k}": np.asarray(v)
        for w, s in (("upper", part.upper), ("lower", part.lower))
        for k, v in s.rows._asdict().items()
    }
    np.savez(
        tmp_path / "rows.npz", **arrays, test_features=arrays["upper_features"][:5], test_benign=arrays["upper_benign"][:5]
    )
    own = site(tmp_path, task="regularisation", loader="files", path="rows.npz")
    task, population = own.load(Regularisation(clients=2))
    first = jax.tree.map(lambda a: a[:5], part.upper.rows)
    np.testing.assert_allclose(
        population.problem.test(task.x, task.y + 0.1, population.test.whole(0)), part.problem.test(task.x, task.y + 0.1, first)
    )
    np.savez(tmp_path / "rows.npz", **arrays, test_features=arrays["upper_features"][:5])
    with pytest.raises(InputError, match="has no array 'test_benign'"):
        own.load(Regularisation(clients=2))


@pytest.mark.parametrize(
    ("content", "elsewhere"),
    [(None, False), ({"a": {"simulated": True}}, False), ({"a": {"simulated": True}, "b": {"simulated": False}}, True)],
)
def test_a_run_folder_knows_whether_its_data_is_at_its_sites(tmp_path, content, elsewhere):
    if content is not None:
        (tmp_path / "sites.json").write_text(json.dumps(content))
    assert RunFolder(tmp_path).data_elsewhere == elsewhere
