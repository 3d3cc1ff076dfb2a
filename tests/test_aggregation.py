"""The place where answers become one value: rules by name, single answers, bytes that cross, and what a site insists on."""

import hashlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import AVERAGED, SHARED_X, deployed

import fedbilevel as fb
from fedbilevel.aggregations import AGGREGATIONS, configured, in_full, in_short, parts, text_of, written
from fedbilevel.algorithms import ALGORITHMS, called
from fedbilevel.command import main
from fedbilevel.core.aggregation import Mean
from fedbilevel.core.participation import Uniform
from fedbilevel.core.traffic import Totals, Traffic, size_in_bytes
from fedbilevel.engines.held import is_per_client
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.engines.simulated_clients import Rehearsed, SimulatedCohort
from fedbilevel.errors import InputError
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.runs.configuration import Configuration
from fedbilevel.runs.folder import RunFolder
from fedbilevel.runs.options import RunOptions
from fedbilevel.runs.rows import with_bytes
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import Quadratic

PAGE = Path(__file__).parent.parent / "docs" / "aggregation.md"


@fb.aggregation
class Largest(fb.Aggregation):
    """Every entry is the largest among the answers: a rule that no weighted sum can be."""

    plus: float = fb.real(0.0, "added to it")

    def combine(self, weights, rows, around, key):
        def largest(r):
            there = (weights > 0).reshape(-1, *[1] * (r.ndim - 1))
            return jnp.where(there, r, -jnp.inf).max(0) + self.plus

        return jax.tree.map(largest, rows)


def one_step(engine, algorithm, task):
    key = jax.random.key(5)

    def both(algorithm, x, y):
        return engine.step(algorithm, engine.init(algorithm, x, y, key).state, jax.random.fold_in(key, 1))

    return (jax.jit(both) if isinstance(engine, SimulatedEngine) else both)(algorithm, task.x, task.y)


def at_server(state):
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_per_client) if not is_per_client(leaf)]


@pytest.mark.parametrize(
    "name", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in AVERAGED if name != "fedavg")]
)
def test_a_rule_replaces_the_mean_in_both_engines(name):
    algorithm = ALGORITHMS[name].configure(name, {})
    task = Quadratic(clients=5, noise=0.3, lower_level=type(algorithm).lower_level).build()
    plain, ours = (SimulatedEngine(task.population, Uniform(3), aggregation=rule) for rule in (Mean(), Largest(plus=0.1)))
    theirs, _ = deployed(algorithm, task.population, Uniform(3), aggregation=Largest(plus=0.1))
    a, b = one_step(ours, algorithm, task), one_step(theirs, algorithm, task)
    without, simulated, messages = (at_server(step.state) for step in (one_step(plain, algorithm, task), a, b))
    assert not all(map(np.allclose, without, simulated))
    for p, q in zip(simulated, messages, strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-6, atol=1e-9)
    assert Totals().plus(a.traffic) == b.traffic


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_rule_sees_every_answer_of_those_who_take_part_and_of_nobody_else(chunk_size):
    task, rule = Quadratic(clients=5).build(), Largest()
    clients = SimulatedEngine(task.population, Uniform(3), chunk_size, aggregation=rule)
    seen = []

    class Look(fb.FedAvg):
        def step(self, state, clients, key):
            cohort = SimulatedCohort(clients, jnp.array([4, 0, 2]), jnp.array([False, True, True]))
            seen.append(cohort.mean(lambda client, x: jnp.full(3, client.number, float), state.x))
            return state

    clients.step(Look(), Look().init(task.x, task.y, None), jax.random.key(0))
    np.testing.assert_array_equal(seen[0], [2.0, 2.0, 2.0])


@pytest.mark.parametrize("name", SHARED_X)
def test_algorithms_say_truly_whether_their_server_needs_single_answers(name, monkeypatch):
    algorithm, asked = ALGORITHMS[name].configure(name, {}), []
    task = Quadratic(clients=3, lower_level=type(algorithm).lower_level).build()
    gather = SimulatedCohort.gather
    monkeypatch.setattr(SimulatedCohort, "gather", lambda *a, **k: asked.append(True) or gather(*a, **k))

    def watch(call):
        return Rehearsed(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), call.result()))

    def rehearsed(key):
        engine = SimulatedEngine(task.population, Uniform(2))
        state, _ = engine.rehearse_init(watch, algorithm, task.x, task.y, key)
        return engine.rehearse_step(watch, algorithm, state, key)

    jax.eval_shape(rehearsed, jax.random.key(0))
    assert bool(asked) == algorithm.single_answers


def test_a_site_that_refuses_gather_refuses_algorithms_that_need_it():
    policy = SitePolicy(refuse=["gather"])
    policy.agree(fb.SimFBO(), Mean())
    policy.agree(fb.FedMBO(estimator="ihgp"), Mean())
    with pytest.raises(InputError, match="refuses gather, but the server of FedMBO needs what each site sends"):
        policy.agree(fb.FedMBO(), Mean())
    fednest = ALGORITHMS["fednest"].configure("fednest", {"estimator": "ihgp"})
    assert (called(fednest), called(fb.FedMBO()), called(fb.SimFBO(rescale=True))) == ("fednest", "FedMBO", "shrofbo")
    with pytest.raises(InputError, match="nothing to refuse called 'gahter'; did you mean gather"):
        SitePolicy(refuse=["gahter"])


def test_a_site_that_insists_on_secure_sums_refuses_others_and_smaller_ones():
    for policy in (SitePolicy(secure_sum=True), SitePolicy(at_least=3)):
        policy.agree(fb.SimFBO(), configured("secure-sum"))
        for rule, name in (("mean", "Mean"), ("krum", "Krum"), ("top-k", "TopK")):
            with pytest.raises(InputError, match=f"insists on secure sums, but the run's aggregation is {name}: refused"):
                policy.agree(fb.SimFBO(), configured(rule))
    with pytest.raises(InputError, match="insists on sums over at least 4 sites, but the run's are over 3: refused"):
        SitePolicy(at_least=4).agree(fb.SimFBO(), configured("secure-sum(at_least=3)"))


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_rule_is_its_text(name):
    text = in_full(name)
    assert text_of(configured(text)) == text == in_full(text)
    assert parts(written(name, {"a": 1, "b": "x"})) == (name, {"a": "1", "b": "x"})


@pytest.mark.parametrize("text", ["", "mean(", "mean(a)", "mean(a=)", "mean(a=1, a=2)", "mean)x("])
def test_a_text_that_is_no_rule_is_refused(text):
    with pytest.raises(InputError, match="aggregate must be"):
        RunOptions(rounds=5, aggregate=text)


def test_unknown_rules_and_settings_are_refused_with_the_nearest():
    with pytest.raises(InputError, match="there is no aggregation 'maen'; did you mean mean"):
        RunOptions(rounds=5, aggregate="maen")
    with pytest.raises(InputError, match="mean has no setting 'trim'"):
        RunOptions(rounds=5, aggregate="mean(trim=1)")


def test_rules_without_weights_refuse_clients_that_weigh_differently():
    rows = [np.ones((4, 1))] * 2
    with pytest.raises(InputError, match="Largest counts every client the same"):
        fb.solve(
            lambda x, y, r: jnp.mean(r) * x.sum() + (y**2).sum(), lambda x, y, r: jnp.mean(r) * ((y - x) ** 2).sum(),
            jnp.zeros(2), jnp.zeros(2), lower=rows, weights=[1, 3], rounds=3, aggregation=Largest(), algorithm="fedbio",
        )  # fmt: skip


def test_a_rule_made_in_python_is_recorded_but_not_resumed(tmp_path):
    task = Quadratic(clients=3).build()
    solution = fb.solve(task, algorithm="fedavg", rounds=4, aggregation=Largest(), out=tmp_path / "run")
    assert len(solution.history) == 2
    assert '"aggregate": "<Largest>"' in (tmp_path / "run" / "config.json").read_text()


def test_options_that_version_0_1_did_not_have_leave_the_fingerprint_of_its_runs_as_it_was():
    described = Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=5))
    newer = ("aggregate", "attack", "privacy", "arrivals")
    old = {name: value for name, value in described.plain().items() if name not in newer}
    assert described.fingerprint() == hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    other = Configuration.resolve("quadratic", {}, "simfbo", {}, RunOptions(rounds=5, aggregate="<Other>"))
    assert described.fingerprint() != other.fingerprint()


def test_bytes_are_those_of_each_numbers_type():
    tree = jnp.zeros((3, 2), jnp.int8), jnp.zeros(5, jnp.float16), True, jax.ShapeDtypeStruct((2,), jnp.uint32)
    assert size_in_bytes(tree) == 6 + 10 + 1 + 8
    assert Totals().plus(Traffic.of_clients(3, up=tree[0], down=tree[1])) == Totals(0, 18, 15, 18, 30)


def test_rows_and_checkpoints_that_counted_floats_alone_get_their_bytes():
    assert with_bytes({"floats_up": 3, "floats_down": 5}, 8) == {
        "floats_up": 3,
        "floats_down": 5,
        "bytes_up": 24,
        "bytes_down": 40,
    }
    assert with_bytes({"floats_up": 3, "floats_down": 5, "bytes_up": 1, "bytes_down": 2}, 8)["bytes_up"] == 1
    assert Totals(2, 3, 5).with_bytes(4) == Totals(2, 3, 5, 12, 20)
    assert Totals(2, 3, 5, 7, 9).with_bytes(4) == Totals(2, 3, 5, 7, 9)


def test_methods_with_one_client_have_nothing_to_aggregate():
    task = Quadratic(clients=3).build()
    for how in ({"aggregate": "median"}, {"attack": "sign-flip:1"}):
        with pytest.raises(InputError, match="stocbio pools all rows in one client: leave out the aggregation and the attack"):
            simulation(task, ALGORITHMS["stocbio"].configure("stocbio", {}), rounds=5, **how)


def test_the_command_takes_rules_and_liars_and_stores_them(tmp_path):
    chosen = ["--aggregate", "trimmed-mean", "--set-aggregate", "byzantine=2", "--attack", "alie:2"]
    run = ["run", "quadratic", "fedavg", "--knob", "clients=5", "--rounds", "3", *chosen, "--out", str(tmp_path / "runs")]
    main.app(run, standalone_mode=False)
    (folder,) = RunFolder.find(tmp_path / "runs")
    assert folder.configuration.options.aggregate == "trimmed-mean(byzantine=2, before=none, bucket=2)"
    assert folder.configuration.options.attack == "alie:2"
    assert Configuration.read(folder.configuration.plain()) == folder.configuration


@pytest.mark.slow
def test_a_rule_of_the_users_own_file_runs_by_name(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    (tmp_path / "mine.py").write_text(code)
    file = f"{tmp_path / 'mine.py'}:Median"
    run = ["run", "quadratic", "fedavg", "--knob", "clients=3", "--rounds", "3", "--aggregate", file]
    main.app([*run, "--out", str(tmp_path / "a")], standalone_mode=False)
    main.app([*run[:-1], "median", "--out", str(tmp_path / "b")], standalone_mode=False)
    ours, theirs = (RunFolder.find(tmp_path / name)[0] for name in "ab")
    assert ours.configuration.names()[2] == file
    np.testing.assert_allclose(ours.x(), theirs.x())
    assert ours.rows()[-1]["upper_loss"] == pytest.approx(theirs.rows()[-1]["upper_loss"])


@pytest.mark.parametrize("name", sorted(AGGREGATIONS.bundled))
def test_a_rule_in_short_has_the_settings_that_are_not_usual(name):
    assert in_short(in_full(name)) == in_short(name) == name
    settings = configured(name).settings()
    if "byzantine" in settings:
        assert in_short(in_full(f"{name}(byzantine=3)")) == f"{name}(byzantine=3)"
    assert in_short("mine.py:Median(cut=1)") == "mine.py:Median(cut=1)"
