"""What a site insists on: rows behind each answer, and a ceiling on what the server's knobs make it build."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import SHARED_X, MemoryStore

import fedbilevel as fb
from fedbilevel.aggregations import configured
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.devices import memory_ceiling, require_memory
from fedbilevel.engines import wire
from fedbilevel.engines.answer_times import AnswerTimes
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.messages import Call, Evaluate, Request, Save
from fedbilevel.errors import InputError
from fedbilevel.federation.begin_message import BeginMessage
from fedbilevel.federation.site_data import SiteData
from fedbilevel.federation.site_policy import SitePolicy
from fedbilevel.federation.sparse_log import MOST_LINES
from fedbilevel.federation.table_questions import LENGTH
from fedbilevel.own_code import sha256_of
from fedbilevel.tasks.data.table_sums import Totals
from fedbilevel.tasks.quadratic import Quadratic


def own(batch_size=None):
    population = Quadratic(clients=2, noise=0.1, rows=32).build().population.only(0)
    return dataclasses.replace(population, batch_size=batch_size)


@pytest.mark.parametrize(
    ("policy", "population", "line"),
    [
        (dict(least_batch_size=9), dict(batch_size=8), "insists on batch_size >= 9, but the run has 8: refused"),
        (dict(least_batch_size=8), dict(batch_size=8), ""),
        (dict(least_batch_size=32), {}, ""),  # without minibatches all rows count
        (dict(least_batch_size=33), {}, "insists on minibatches of 33 rows, but a loss has fewer: refused"),
        (
            dict(least_batch_size=33),
            dict(batch_size=64),
            "insists on minibatches of 33 rows, but a loss has fewer: refused",
        ),
        (dict(least_rows=32), {}, ""),
        (dict(least_rows=33), {}, "insists on at least 33 rows behind an answer: refused"),
        (dict(least_rows=9), dict(batch_size=8), "insists on at least 9 rows behind an answer: refused"),
    ],
)
def test_a_site_insists_on_the_rows_behind_an_answer(policy, population, line):
    if not line:
        return SitePolicy(**policy).agree_rows(own(**population))
    with pytest.raises(InputError, match=re.escape(line)):
        SitePolicy(**policy).agree_rows(own(**population))


@pytest.mark.parametrize("knob", ["clients", "x_dimension", "y_dimension", "rows"])
def test_what_the_servers_knobs_ask_for_is_refused_before_it_is_built(tmp_path, knob):
    """With the memory that is there, each would be built."""
    (tmp_path / "site.toml").write_text('task = "quadratic"\nloader = "share"\n[policy]\nmemory = 0.001\n')
    site = SiteData.read(tmp_path / "site.toml")
    with (
        memory_ceiling(site.policy.memory * 1e9),
        pytest.raises(InputError, match="of memory are needed"),
    ):
        site.load(site.configured("task", "quadratic", {}, {"noise": 0.1, knob: 10**4}))


def test_a_minibatch_is_below_the_same_ceiling():
    population = own(batch_size=10**6)
    SitePolicy().agree_rows(population)
    with memory_ceiling(1e6), pytest.raises(InputError, match=r"a minibatch: .* lower batch_size"):
        SitePolicy().agree_rows(population)


def test_a_ceiling_ends_with_its_block():
    with pytest.raises(InputError, match="the rows"), memory_ceiling(10):
        require_memory("the rows", 11, "give fewer")
    require_memory("the rows", 11, "give fewer")


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("memory = 0", "memory must be a number of gigabytes above 0"),
        ("memory = nan", "memory must be a number of gigabytes above 0"),
        ("seconds = -1", "seconds must be a number of seconds above 0"),
        ("at_least = -1", "at_least must be a whole number of at least 0; given: -1"),
        ("least_rows = -100", "least_rows must be a whole number of at least 0; given: -100"),
        ("least_batch_size = -2", "least_batch_size must be a whole number of at least 0; given: -2"),
        ("colluding = -1", "colluding must be a whole number of at least 0; given: -1"),
        ("most_weight = 0", "most_weight must be above 0 and at most 1; given: 0"),
        ("most_weight = 75", "most_weight must be above 0 and at most 1; given: 75"),
        ("at_least = 3\ncolluding = 3", "at_least must be above the 3 colluding; given: 3"),
        ("at_least = 1\nepsilon = 8", "at_least must be above the 1 colluding; given: 1"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(tmp_path, policy, line):
    (tmp_path / "site.toml").write_text(f'task = "quadratic"\nloader = "share"\n[policy]\n{policy}\n')
    with pytest.raises(InputError, match=f"policy: {line}"):
        SiteData.read(tmp_path / "site.toml")


@pytest.mark.parametrize(
    ("weights", "at_least", "share"),  # of the largest, in a sum over as few as there may be
    [
        ((1.0,) * 3, 3, None),
        ((1.0, 2.0, 3.0, 6.0), 3, None),
        ((2.9994, 3e-6, 3e-6), 3, "1"),
        ((0.5, 0.5, 3.0), 3, None),  # 0.75
        ((0.49, 0.51, 3.01), 3, "0.751"),
        ((1.0, 1.0, 3.0, 3.0, 7.0), 3, "0.778"),  # in a sum over the first two and the last
        ((1.0, 1.0, 3.0, 3.0, 7.0), 4, None),
        ((0.0, 0.0, 3.0), 3, "1"),
        ((-5.0, -5.0, 1.0), 3, "-0.111"),
        ((-1.0, 1.0, 2.0), 3, "1"),
        ((float("nan"), 1.0, 1.0), 3, "nan"),
        ((0.0, 0.0, 0.0), 3, "nan"),
    ],
)
def test_a_site_that_insists_on_secure_sums_is_in_none_that_nearly_is_one_sites_answer(weights, at_least, share):
    rule = configured(f"secure-sum(at_least={at_least})")
    SitePolicy().agree_weights(rule, weights)
    if share in (None, "1") and min(weights) >= 0:
        SitePolicy(secure_sum=True, most_weight=1.0).agree_weights(rule, weights)
    for policy in (SitePolicy(secure_sum=True), SitePolicy(at_least=3)):
        if share is None:
            policy.agree_weights(rule, weights)
        else:
            with pytest.raises(
                InputError, match=f"^this site allows one site 0.75 .* one of {at_least} can have {share}: refused"
            ):
                policy.agree_weights(rule, weights)
    SitePolicy(secure_sum=True).agree_weights(configured("mean"), ())


def test_a_run_with_such_weights_is_refused_before_anything_about_the_data_is_sent(own_site, tmp_path):
    text = 'task = "quadratic"\nloader = "share"\n[policy]\nsecure_sum = true\n'
    (tmp_path / "local" / "site.toml").write_text(text)
    weights = (2.999997, 1.5e-6, 1.5e-6)
    run = BeginMessage("quadratic", {}, "fedbio", {}, "float64", "ab", number=1, weight=weights[1], names=("a", "b", "c"))
    said = own_site.begin(dataclasses.replace(run, weights=weights, aggregate="secure-sum").encoded())
    assert said[:2] == [False, "refused"] and said[2].startswith("this site allows one site 0.75 of a secure sum's weights")


TASK = """
import fedbilevel as fb

@fb.task(columns=fb.Columns("label", ["age"], split="role"))
def mine(data: fb.Tables) -> fb.Task:
    raise AssertionError("built")
"""
TOTALS = Totals({}, 2)


@pytest.fixture
def table_site(own_site, tmp_path):
    """A function that sets a site with a table of 3 + 2 rows up with a policy, and returns what it says to a question."""
    file, table = tmp_path / "mine.py", tmp_path / "local" / "rows.csv"
    file.write_text(TASK)
    table.write_text("age,label,role\n1,0,train\n2,1,train\n3,0,train\n4,1,validation\n5,0,validation\n")

    def ask(policy="", algorithm="simfbo", question=TOTALS, aggregate="mean"):
        sha256 = sha256_of(file.read_bytes())
        lines = ['task = "mine"', 'loader = "table"', 'path = "rows.csv"', "[policy]", policy]
        lines += ["[trusted]", f'"{file}" = "{sha256}"', ""]
        (tmp_path / "local" / "site.toml").write_text("\n".join(lines))
        names, code = ("a", "b"), {"task": sha256}
        run = BeginMessage("mine", {}, algorithm, {}, "float64", "ab", number=1, weight=1.0, names=names, code=code)
        run = dataclasses.replace(run, aggregate=aggregate)
        beginning = run.encoded()
        return own_site.describe(len(beginning).to_bytes(LENGTH, "little") + beginning + wire.encode(question))

    return ask


def test_a_site_says_nothing_about_its_table_to_a_run_that_it_would_refuse(table_site):
    for policy, algorithm, line in (
        ("least_rows = 3", "simfbo", "this site insists on at least 3 rows behind an answer"),
        ('refuse = ["gather"]', "cm-soba", "this site refuses gather, but the server of CMSOBA needs what each site sends"),
        ("secure_sum = true", "simfbo", "this site insists on secure sums, but the run's aggregation is Mean"),
    ):
        assert table_site(policy, algorithm) == [False, "refused", f"{line}: refused"]
    line = "tables are preprocessed from each site's exact sums, which private-sum does not hide: refused"
    assert table_site(aggregate="private-sum(noise=2)") == [False, "refused", line]
    done, answer = table_site('least_rows = 2\nrefuse = ["gather"]')
    assert done and wire.decode(answer).tolist() == [0, 5, 0, 3, 5, 5, 15, 2]


def test_a_site_answers_about_its_table_only_for_the_sites_of_the_run(table_site):
    said = table_site(question=Totals({}, 3))
    assert said == [False, "refused", "the question about a table is not for the 2 sites of its run: refused"]


@pytest.mark.parametrize("file", ["local/rows.csv", "mine.py"])
def test_a_reason_that_a_site_keeps_to_itself_does_not_fill_its_log(table_site, tmp_path, caplog, file):
    """With a table that cannot be read, and with pinned code that fails."""
    (tmp_path / file).write_text("raise ValueError('no table')\n")
    for _ in range(MOST_LINES + 50):
        done, kind, line = table_site()
        assert (done, kind) == (False, "refused") and line.endswith("; its log says why")
    assert len(caplog.records) == MOST_LINES + 1 and file in caplog.text and file not in line


@pytest.mark.parametrize(
    ("algorithm", "policy", "line"),
    [
        (fb.FedBiO(local_steps=10**9), {}, r"an answer of local_point would take \d+ \w+ or more here, and this site allows"),
        (fb.FedBiOAcc(local_steps=10**6), {"memory": 0.01}, "an array of first_momentum"),
        (fb.FedBiOAcc(), {}, None),
    ],
)
def test_a_server_cannot_have_a_site_compute_without_end(algorithm, policy, line):
    policy = SitePolicy(**policy)
    task = Quadratic(clients=1, noise=0.1).build()
    shapes = call_shapes(algorithm, task.population, task.x, task.y)
    with memory_ceiling(policy.memory * 1e9):
        if line is None:
            assert policy.agree_work(algorithm, task.population, shapes, 1)
            return
        with pytest.raises(InputError, match=line):
            policy.agree_work(algorithm, task.population, shapes, 1)


ENDLESS = r"stirred has a loop whose length is not known before it runs, .* give the loop a bound, or have .* seconds = inf"


@fb.algorithm
class Stirred(fb.FedAvg):
    """Stirs y until it is calm, or for so many turns."""

    turns: int = fb.count(0, "turns at the most; 0: no limit", least=0)

    @fb.at_client
    def stirred(self, client, x, y):
        def goes_on(carry):
            k, y = carry
            calm = jnp.abs(y).max() <= 1e-3
            return ~calm & (k < self.turns) if self.turns else ~calm

        return jax.lax.while_loop(goes_on, lambda carry: (carry[0] + 1, 0.5 * carry[1]), (0, y))[1]

    def step(self, state, clients, key):
        return state._replace(y=clients.draw().mean(self.stirred, state.x, state.y))


@pytest.mark.parametrize(
    ("algorithm", "seconds", "line"),
    [
        (fb.SimFBO(local_steps=2 * 10**9, spread=1), 5.0, r"an answer of direction_sum would take \d+ minutes or more here"),
        (fb.SimFBO(spread=2 * 10**9), 5.0, None),  # client 1 makes two steps
        (fb.SimFBO(spread=2, local_steps=100), 5.0, None),
        (fb.SimFBO(spread=2, rescale=True), 5.0, None),
        (Stirred(), 5.0, ENDLESS),
        (Stirred(), np.inf, None),
        (Stirred(turns=2 * 10**9), 5.0, "an answer of stirred would take"),
        (Stirred(turns=10), 5.0, None),
    ],
)
def test_loops_of_unknown_length_count_as_long_as_they_can_be(algorithm, seconds, line):
    task = Quadratic(clients=2, noise=0.1).build()
    own = task.population.only(1)
    shapes = call_shapes(algorithm, own, task.x, task.y)
    if line is None:
        assert SitePolicy(seconds=seconds).agree_work(algorithm, own, shapes, 1)
        return
    with pytest.raises(InputError, match=line):
        SitePolicy(seconds=seconds).agree_work(algorithm, own, shapes, 1)


@pytest.mark.parametrize("function", ["local_y", "evaluate"])
def test_what_a_request_computes_counts_together(function):
    """Its metrics too, and before any of it is computed."""
    algorithm, task = fb.FedAvg(), Quadratic(clients=1).build()
    own, x, y = task.population.only(0), np.asarray(task.x), np.asarray(task.y)
    shapes = call_shapes(algorithm, own, task.x, task.y)
    estimates = SitePolicy().agree_work(algorithm, own, shapes, 0).estimates
    (seconds,) = (needed for (name, _), needed in estimates.items() if name == function)
    site = ClientRuntime(algorithm, own, 0, 1.0, shapes, times=AnswerTimes(2.5 * seconds, estimates))
    one = Evaluate(x, y) if function == "evaluate" else Call(function, np.zeros(2, np.uint32), (x, y), None)
    for number in (1, 2, 1, 2):  # each request anew
        site.answer(wire.encode(Request([one] * number, False, [])))
    with pytest.raises(InputError, match=r"a request would take .* s or more here, and this site allows .* s: ask for less"):
        site.answer(wire.encode(Request([one] * 3, False, [])))


@pytest.mark.parametrize("name", SHARED_X)
def test_no_algorithm_is_refused_for_what_its_defaults_have_a_site_compute(name):
    algorithm = ALGORITHMS[name].configure(name, {})
    task = Quadratic(clients=2, noise=0.1, lower_level=type(algorithm).lower_level).build()
    own = task.population.only(1)
    SitePolicy(seconds=1.0).agree_work(algorithm, own, call_shapes(algorithm, own, task.x, task.y), 1)


class Noted(AnswerTimes):
    """Counts what is computed next."""

    computed = 0

    def count(self, name, args):
        self.computed += 1


def runtime_of(x_entries, memory, times):
    """A site with an x of its own of so many entries, which lets values take so many bytes."""

    def loss(x, y, rows):
        return jnp.mean((rows - y) ** 2) * x[0]

    task = fb.Task.of(loss, loss, jnp.zeros(x_entries), jnp.zeros(1), lower=[np.ones((4, 1))], own_x=True)
    algorithm, own = fb.FedPaceOwn(), task.population.only(0)
    shapes = call_shapes(algorithm, own, task.x, task.y)
    return ClientRuntime(algorithm, own, 0, 1.0, shapes, MemoryStore(), memory=memory, times=times)


@pytest.mark.parametrize("form", ["kept", "not kept", "one after another", "saved"])
def test_values_take_no_more_than_a_sites_memory_and_are_counted_before_they_are_computed(form):
    entries, fit = 1000, 6  # four vectors of float64 in a value, and the rounds
    times = Noted()
    site = runtime_of(entries, fit * (4 * 8 * entries + 4), times)

    def ask(expression, *needed):
        return site.answer(wire.encode(Request(expression, False, list(needed))))

    begun = [Call("begin", np.zeros(2, np.uint32), (), None if form == "not kept" else slot) for slot in range(fit + 1)]
    with pytest.raises(
        InputError, match="values here may take 192,024 bytes, and these take 224,028: refused unless the site's"
    ):
        if form == "one after another":
            for slot, call in enumerate(begun):
                ask(call, *range(slot))
        elif form == "saved":
            ask(begun[: fit // 2])
            ask(Save(1, begun[: fit // 2 + 1], -1), *range(fit // 2))
        else:
            ask(begun)
    assert times.computed == fit


def test_a_site_gives_a_run_its_memory(own_site, tmp_path):
    (tmp_path / "weights.py").write_text(OWN_X)
    sha256 = sha256_of((tmp_path / "weights.py").read_bytes())
    text = f'task = "weights"\nloader = "share"\n[policy]\nmemory = 2e-5\n[trusted]\n"{tmp_path / "weights.py"}" = "{sha256}"\n'
    (tmp_path / "local" / "site.toml").write_text(text)
    run = BeginMessage("weights", {}, "fedpace-own", {}, "float64", "ab", number=0, weight=1.0, names=("a", "b"))
    assert own_site.begin(dataclasses.replace(run, code={"task": sha256}).encoded())[0]
    begun = [Call("begin", np.zeros(2, np.uint32), (), slot) for slot in range(200)]
    done, kind, line = own_site.answer(wire.encode(Request(begun, False, [])))
    assert (done, kind) == (False, "refused") and line.startswith("values here may take 20,000 bytes")


OWN_X = """
import numpy as np

import fedbilevel as fb


@fb.task
def weights(data: str = "") -> fb.Task:
    f = lambda x, y, rows: ((rows - y) ** 2).mean()
    g = lambda x, y, rows: (x**2 * (rows - y) ** 2).mean()
    return fb.Task.of(f, g, np.ones(5), np.zeros(1), lower=[np.arange(5.0).reshape(5, 1)] * 2, own_x=True)
"""


@pytest.mark.parametrize(
    ("task", "algorithm", "line"),
    [
        ("weights", "fedbio", "FedBiO is for an x that all clients share, but the task has an x per client"),
        ("quadratic", "fedpace-own", "FedPaceOwn is for an x per client, but the task has an x that all clients share"),
        ("quadratic", "fedbio-local", "FedBiOLocal is for a local lower level, but the task has a global one"),
    ],
)
def test_a_server_cannot_begin_an_algorithm_that_is_for_another_kind_of_task(own_site, tmp_path, task, algorithm, line):
    """One for a shared x would send what it computes with the x that each site keeps."""
    file = tmp_path / "weights.py"
    file.write_text(OWN_X)
    sha256, own = sha256_of(file.read_bytes()), task == "weights"
    text = f'task = "{task}"\nloader = "share"\n[trusted]\n"{file}" = "{sha256}"\n'
    (tmp_path / "local" / "site.toml").write_text(text)
    run = BeginMessage(task, {}, algorithm, {}, "float64", "ab", number=0, weight=1.0, names=("a", "b"))
    done, kind, said = own_site.begin(dataclasses.replace(run, code={"task": sha256} if own else {}).encoded())
    assert (done, kind) == (False, "refused") and said.startswith(line)
    suited = {"weights": "fedpace-own"}.get(task, "fedpace")
    assert own_site.begin(dataclasses.replace(run, algorithm=suited, code={"task": sha256} if own else {}).encoded())[0]
