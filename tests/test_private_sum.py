"""Noise that clients add to secure sums: its size whoever drops out, ε, a canary, the budget of a site, and both engines."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed
from private_rows import told_apart
from scipy.stats import norm
from signing import Keys, Signer

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.aggregations.private_sum import LEAST_STEPS, LONGEST, PrivateSum
from fedbilevel.core.participation import Dropouts, Everyone, Uniform
from fedbilevel.core.privacy_accounting import Event, epsilon
from fedbilevel.engines.client_runtime import ClientRuntime, encoded
from fedbilevel.engines.loopback import Loopback
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.errors import InputError
from fedbilevel.federation.own_noise import OwnNoise
from fedbilevel.federation.privacy_ledger import Ledger
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.quadratic import Quadratic

RULE = "private-sum(at_least=3, colluding=0, clip=2, noise=1.5)"


def opened(rule, changes, keys):
    """The sum, in units of the bound, that the server opens of these clients' messages, for each key."""

    def total(key):
        def sent(m, change):
            return rule.with_noise(jax.random.fold_in(key, m), rule.encode(None, change, change)[0])

        return jax.vmap(sent)(jnp.arange(len(changes)), changes).sum(0, dtype=jnp.int32) * (rule.step / rule.clip)

    return np.asarray(jax.jit(jax.vmap(total))(jax.random.split(jax.random.key(keys[0]), keys[1])))


@pytest.mark.parametrize(("there", "colluding"), [(3, 0), (3, 2), (5, 0), (5, 1)])
def test_any_sum_that_can_be_opened_has_enough_noise_besides_that_of_those_who_tell_theirs(there, colluding):
    rule = dataclasses.replace(configured(RULE), colluding=colluding)
    noise = opened(rule, jnp.zeros((there - colluding, 3)), (there, 4000))
    np.testing.assert_allclose(noise.std(0), 1.5 * np.sqrt((there - colluding) / (3 - colluding)), rtol=0.05)
    assert (noise.std(0) > 0.95 * 1.5).all()
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.08


def test_unless_told_otherwise_the_noise_is_enough_without_the_share_that_each_member_knows():
    rule = configured("private-sum(at_least=3, clip=2, noise=1.5)")
    np.testing.assert_allclose(opened(rule, jnp.zeros((2, 3)), (0, 4000)).std(0), 1.5, rtol=0.05)
    assert configured("private-sum(at_least=2, noise=1.5)").share == 1.5


def test_rounded_noise_has_the_distribution_that_epsilon_is_for():
    """The sum of m rounded normal numbers is, to all digits, a rounded sum of m normal and m - 1 uniform ones."""
    deviation, ends = 1.5, 60  # of 4096 here, where aliases would be seen

    whole = np.arange(-ends, ends + 1)
    rounded = norm.cdf(whole + 0.5, scale=deviation) - norm.cdf(whole - 0.5, scale=deviation)
    total = np.convolve(np.convolve(rounded, rounded, "same"), rounded, "same")
    fine = np.arange(-ends, ends + 1e-9, 1 / 64)
    density = norm.pdf(fine, scale=deviation * np.sqrt(3))
    uniform = np.r_[0.5, np.ones(63), 0.5] / 64  # the trapezoidal rule
    for _ in range(3):  # the third is the last rounding
        density = np.convolve(density, uniform, "same")
    np.testing.assert_allclose(total, density[::64], atol=1e-5)
    assert np.pi**2 * LEAST_STEPS**2 / 2 > 8000 * np.log(10)


@pytest.mark.parametrize(
    "settings", ["noise=1", "noise=1e-3", "noise=1e4, at_least=16", "noise=1, cohort=20000", "noise=9, cohort=99999"]
)
def test_whole_numbers_fit_and_stand_for_what_they_should(settings):
    rule = configured(f"private-sum({settings}, clip=2)")
    assert rule.clip / rule.step + LONGEST * rule.deviation <= rule.most * (1 + 1e-9) and rule.most * rule.cohort < 2**31
    assert rule.deviation >= LEAST_STEPS and rule.deviation * rule.step == pytest.approx(rule.share * rule.clip)
    noise = opened(rule, jnp.zeros((rule.at_least - rule.colluding, 2)), (0, 2000))
    np.testing.assert_allclose(noise.std(0), rule.noise, rtol=0.06)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_no_change_counts_for_more_than_the_bound(dtype, size):
    rule = configured(RULE)
    change = {"a": jnp.asarray(np.random.default_rng(0).normal(size=70_000) * size, dtype), "b": jnp.asarray(size, dtype)}
    message, left = rule.encode(None, change, jax.tree.map(jnp.zeros_like, change))
    numbers = np.concatenate([np.ravel(m).astype(float) for m in jax.tree.leaves(message)])
    length = np.linalg.norm(numbers) * rule.step
    assert length <= rule.clip and (size < 1 or length > 0.99 * rule.clip)
    assert (np.abs(numbers) <= rule.clip / rule.step).all() and not any(np.any(leaf) for leaf in jax.tree.leaves(left))
    lost = rule.encode(None, {"a": jnp.full(3, jnp.nan, dtype)}, None)[0]
    assert not np.any(lost["a"])


def audited(rule, there, trials=20_000, tell=lambda rule, changes, keys: opened(rule, changes, keys)):
    """A lower bound on ε of one sum: a canary whose change is as long as can be is in it or not."""
    changes = jnp.zeros((there, 2)).at[0, 0].set(100.0)
    return told_apart(tell(rule, changes, (1, trials))[:, 0], tell(rule, changes.at[0].set(0), (2, trials))[:, 0], 0.01)


CLAIMED = epsilon(Counter({Event(1.0, 1.5): 1}), 0.01)


def test_an_audit_finds_no_more_than_is_claimed_whoever_drops_out_or_tells_its_noise():
    rule = configured(RULE)
    assert 0.5 * CLAIMED < audited(rule, 3) < CLAIMED
    honest = audited(dataclasses.replace(rule, colluding=1), 2)  # of three, one has told its noise
    assert 0.5 * CLAIMED < honest < CLAIMED


class Unclipped(PrivateSum):
    def encode(self, key, change, memory):
        return jnp.trunc(change / self.step).astype(jnp.int32), memory


class SharedNoise(PrivateSum):
    def with_noise(self, key, message):
        return super().with_noise(jax.random.key(0), message)


@pytest.mark.parametrize(
    ("rule", "there"),
    [
        (dict(at_least=12), 3),  # as if noise for twelve sites were enough for three
        ({}, 1),  # two of three have told their noise, and the rule did not count on it
        (dict(noise=0.75), 3),
        (dict(of=Unclipped), 3),
        (dict(of=SharedNoise), 3),
    ],
)
def test_an_audit_finds_mistakes(rule, there):
    made = configured(RULE)
    given = {"at_least": 3, "colluding": 0, "clip": 2.0, "noise": 1.5} | {k: v for k, v in rule.items() if k != "of"}
    made = rule.get("of", type(made))(**given)
    assert audited(made, there) > CLAIMED


def federation(algorithm, task, participation, rule, noises=None):
    """Both engines, with clients whose noise comes from the server's keys unless they have their own."""
    keys = Keys(task.population.size)
    signers = [Signer(keys, m) for m in range(task.population.size)]
    ours = SimulatedEngine(task.population, participation, aggregation=rule)
    theirs, runtimes = deployed(algorithm, task.population, participation, (task.x, task.y), None, rule, signers)
    if noises:
        runtimes = {
            m: ClientRuntime(algorithm, task.population.only(m), m, aggregation=rule, identity=signers[m], noise=noises[m])
            for m in runtimes
        }
        theirs.exchange.transport = Loopback(runtimes)
    return ours, theirs


def stepped(engine, algorithm, task, key):
    return engine.step(algorithm, engine.init(algorithm, task.x, task.y, key).state, jax.random.fold_in(key, 1))


@pytest.mark.parametrize("weights", [pytest.param("equal", marks=pytest.mark.slow), "1,2,3,4"])
def test_simulation_and_federation_add_up_the_same_noisy_numbers(weights):
    algorithm, key, task = fb.FedBiO(), jax.random.key(5), Quadratic(clients=4, noise=0.3).build()
    task = dataclasses.replace(task, population=task.population.weighted(weights))
    rule = configured("private-sum(clip=100, noise=1e-5)")  # so that nothing is shortened, and weights are seen
    ours, theirs = federation(algorithm, task, Uniform(3), rule)
    a, b = (stepped(engine, algorithm, task, key) for engine in (ours, theirs))
    np.testing.assert_allclose(a.state.x, b.state.x, rtol=1e-12, atol=1e-12)
    assert tuple(np.asarray(getattr(a.traffic, n))[1] for n in ("bytes_up", "bytes_down")) == b.traffic[3:]
    plain = stepped(SimulatedEngine(task.population, Uniform(3)), algorithm, task, key)
    assert 1e-5 < np.abs(plain.state.x - a.state.x).max() < 5e-3  # in which weights make one of 0.012


def test_a_weight_lengthens_no_message_beyond_the_bound():
    rule, answer = configured(RULE), jnp.asarray([1.2, -1.6, 0.0])  # as long as may be
    lengths = {
        weight: np.linalg.norm(np.asarray(encoded(rule, np.zeros(2, np.uint32), answer, [], None, weight)[0]) * rule.step)
        for weight in (None, 0.25, 4.0)
    }
    assert lengths[0.25] == pytest.approx(0.5, abs=1e-3)
    assert all(0.99 * 2 < lengths[weight] <= 2 for weight in (None, 4.0))


def test_truncation_lengthens_nothing():
    """In steps that are coarse, an entry above half a step counts for none."""
    rule = configured("private-sum(at_least=2, noise=5, cohort=1600000)")
    rule.require_steps()
    assert 0.05 < rule.step / rule.clip < 0.1
    assert not np.any(rule.encode(None, jnp.full(9, 0.6 * rule.step), None)[0])


def test_a_length_at_the_bound_is_not_rounded_beyond_it():
    """Here the bound is a little less than a whole number of steps, and in single precision that number."""
    rule = configured(f"private-sum(at_least=2, noise={2**17 / 99_999.999}, clip=2)")
    assert np.float32(rule.clip / rule.step) == 100_000
    for length in (rule.clip, np.nextafter(np.float32(rule.clip), np.float32(0)), 1e6):
        sent = np.asarray(rule.encode(None, jnp.asarray([length, 0], jnp.float32), None)[0], float)
        assert 0.99 * rule.clip < np.linalg.norm(sent) * rule.step <= rule.clip


def test_without_noise_to_speak_of_it_is_the_mean():
    algorithm, key, task = fb.FedBiO(), jax.random.key(5), Quadratic(clients=4, noise=0.3).build()
    rule = configured("private-sum(clip=100, noise=0.001)")
    quiet, plain = (
        stepped(SimulatedEngine(task.population, Everyone(), aggregation=r), algorithm, task, key)
        for r in (rule, configured("mean"))
    )
    np.testing.assert_allclose(quiet.state.y, plain.state.y, atol=0.5)
    few = SimulatedEngine(task.population, Dropouts(Everyone(), 0.9), aggregation=rule)
    assert np.isnan(stepped(few, algorithm, task, key).state.x).any()


class FreshNoise:
    def __init__(self):
        self.asked = []

    def key(self, name, key, args):
        self.asked.append(name)
        return np.random.default_rng().integers(0, 2**32, 2, dtype=np.uint32)


def test_sites_make_their_own_noise_for_every_sum():
    algorithm, key, task = fb.FedBiO(), jax.random.key(5), Quadratic(clients=4).build()
    noises = [FreshNoise() for _ in range(4)]
    _, theirs = federation(algorithm, task, Everyone(), configured(RULE), noises)
    first, second = (stepped(theirs, algorithm, task, key).state.x for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    asked = len(noises[0].asked)
    assert asked > 0 and all(noise.asked == noises[0].asked for noise in noises)
    theirs.evaluate(task, theirs.init(algorithm, task.x, task.y, key).state)
    assert noises[0].asked[-1] == "evaluate"


def test_metrics_leave_with_noise_of_their_own_which_is_fresh_for_every_evaluation():
    algorithm, task, times = fb.FedBiO(), Quadratic(clients=4).build(), 300
    rule = configured("private-sum(at_least=3, colluding=1, noise=1, metric_noise=1.5, metric_clip=6)")
    ours, theirs = federation(algorithm, task, Everyone(), rule, [FreshNoise() for _ in range(4)])
    state = theirs.init(algorithm, task.x, task.y, jax.random.key(5)).state
    exact = ours.evaluate(task, ours.init(algorithm, task.x, task.y, jax.random.key(5)).state)
    measured = theirs.evaluate(task, state)
    names = [name for name in task.population.problem.metric_names if name in measured]
    assert len(names) >= 2
    each = np.asarray([[theirs.evaluate(task, state)[name] for name in names] for _ in range(times)])
    deviation = 1.5 * 6 * np.sqrt(len(names)) * np.sqrt(4 / (3 - 1)) / 4
    assert len(np.unique(each, axis=0)) == times
    np.testing.assert_allclose(each.std(0), deviation, rtol=0.2)
    np.testing.assert_allclose(each.mean(0), [exact[name] for name in names], atol=5 * deviation / np.sqrt(times))


def test_a_metric_beyond_the_bound_leaves_the_others_as_they_are():
    rule = configured("private-sum(noise=1, metric_clip=2)")
    step = rule.for_metrics(5).step
    sent = np.asarray(rule.encode_metrics(jnp.asarray([1e9, 0.5, -jnp.inf, jnp.nan, -1.5]))) * step
    np.testing.assert_allclose(sent, [2, 0.5, -2, 0, -1.5], atol=step)
    full = np.asarray(rule.encode_metrics(jnp.full(5, -9.0))) * step
    assert 0.99 * 2 * np.sqrt(5) < np.linalg.norm(full) <= 2 * np.sqrt(5)


def test_a_client_that_has_to_add_noise_is_not_made_without_any():
    algorithm, task = fb.FedBiO(), Quadratic(clients=4).build()
    with pytest.raises(ValueError, match="a client has keys for its own noise"):
        ClientRuntime(algorithm, task.population.only(0), 0, aggregation=configured(RULE))


def test_a_run_is_calibrated_to_its_epsilon_metrics_included():
    problem = Quadratic(clients=4).build()
    rule = "private-sum(epsilon=5, delta=1e-4, metric_noise=40)"
    experiment = simulation(problem, fb.SimFBO(), steps=20, every=10, aggregate=rule)
    noise = experiment.engine.aggregation.noise
    spent = [moment.metrics["epsilon"] for moment in experiment.run() if moment.metrics]
    rounds = 20 * 1
    events = Counter({Event(1.0, noise): 20, Event(1.0, 40.0): rounds // 10 + 2})
    assert spent[-1] == epsilon(events, 1e-4) and 4.95 < spent[-1] <= 5


def test_a_site_pays_for_every_sum_and_refuses_what_exceeds_its_budget(tmp_path):
    rule = configured("private-sum(noise=20)")
    ledger = Ledger(tmp_path, 2.0, 1e-5)
    noise = OwnNoise("a", rule, ledger)
    noise.require({"direction": 3, "evaluate": 2})
    first, again = (noise.key("direction", np.zeros(2, np.uint32), ()) for _ in range(2))
    assert not np.array_equal(first, again)  # the same question, with other noise, and paid for twice
    noise.key("evaluate", np.zeros(2, np.uint32), ())
    spent = epsilon(Counter({Event(1.0, 10.0): 2, Event(1.0, 15.0): 1}), 1e-5)  # one row moves an answer by twice the bound
    assert Ledger(tmp_path, None, 1e-5).epsilon() == spent
    with pytest.raises(InputError, match="this run would spend"):
        noise.require({"direction": 30})
    with pytest.raises(InputError, match="the next answer would spend"):
        for _ in range(30):
            noise.key("direction", np.zeros(2, np.uint32), ())
    assert Ledger(tmp_path, None, 1e-5).epsilon() <= 2.0
    with pytest.raises(InputError, match="are not those of its algorithm"):
        noise.require({"direction": -1})
    with pytest.raises(InputError, match="give epsilon"):
        OwnNoise("a", configured("private-sum(epsilon=3)"), ledger)
    with pytest.raises(InputError, match="is too small for sums of 32 bits"):  # so that it would be rounded away
        OwnNoise("a", configured(f"private-sum(noise=0.5, cohort={2**27})"), ledger)


def test_policies_take_it_for_what_it_is():
    def agree(given="", **policy):
        SitePolicy(**policy).agree(fb.SimFBO(), configured(f"private-sum(at_least=3, noise=2{given})"))

    trusting = dict(secure_sum=True, at_least=3, epsilon=8.0)
    agree(**trusting)
    agree(", colluding=0", **trusting, colluding=0)
    agree(", colluding=0", secure_sum=True)
    agree(", colluding=2", **trusting, colluding=2)
    for part in (dict(epsilon=8.0), dict(epsilon=8.0, secure_sum=True), dict(epsilon=8.0, at_least=3)):
        with pytest.raises(InputError, match="only where its owner has set secure_sum and at_least too: add --epsilon"):
            agree(**part)
    for given, policy, line in (
        (", colluding=0", trusting, "enough if colluding = 1 members know theirs, but the run has 0: refused"),
        ("", dict(colluding=2), "enough if colluding = 2 members know theirs, but the run has 1: refused"),
        ("", dict(at_least=4), "sums over at least 4 sites"),
        ("", dict(colluding=-1), "colluding must be a whole number of at least 0; given: -1"),
    ):
        with pytest.raises(InputError, match=line):
            agree(given, **policy)
    SitePolicy(secure_sum=True, colluding=2).agree(fb.SimFBO(), configured("secure-sum"))  # which has no noise to know


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: configured("private-sum(at_least=2, colluding=2)"), "colluding must be below at_least, which is 2; given: 2"),
        (lambda: configured("private-sum(noise=1, epsilon=1)"), "^private-sum: give either epsilon"),
        (lambda: configured("private-sum(noise=1, clip=1e-22)"), "clip must be a number of at least 1e-06; given: 1e-22"),
        (lambda: configured("private-sum(noise=1e5)"), "noise must be a number above 0 and at most 10000"),
        (lambda: run("private-sum(epsilon=1e-4)"), "no noise makes this run"),
        (lambda: run("private-sum"), "^private-sum: give epsilon"),
        (lambda: run("private-sum(noise=1)", algorithm=fb.FedMBO()), "needs single answers"),
        (lambda: run("private-sum(noise=1)", privacy="rows(noise=1)"), "leave out either"),
        (lambda: run("private-sum(noise=1)", keep_best=True), "chooses by rows without noise"),
        (lambda: run("private-sum(noise=1e-9)"), "noise = 1e-09 is too small for sums of 32 bits"),
        (lambda: run("private-sum(noise=1, at_least=5)"), "at_least must be at most the 4 clients"),
    ],
)
def test_what_cannot_be_is_refused_with_a_line(build, line):
    with pytest.raises(InputError, match=line):
        build()


def run(rule, algorithm=None, **how):
    return simulation(Quadratic(clients=4).build(), algorithm or fb.SimFBO(), rounds=9, aggregate=rule, **how)
