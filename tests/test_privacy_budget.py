"""A site's privacy budget: refused before it is exceeded, never undercounted, and not paid twice for the same answer."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed
from private_rows import population

import fedbilevel as fb
from fedbilevel.core.aggregation import Mean
from fedbilevel.core.participation import Everyone
from fedbilevel.core.privacy_accounting import Event, epsilon
from fedbilevel.core.randomness import key
from fedbilevel.engines.call_shapes import call_shapes
from fedbilevel.engines.client_runtime import ClientRuntime
from fedbilevel.engines.loopback import Loopback
from fedbilevel.errors import InputError
from fedbilevel.federation import site
from fedbilevel.federation.begin_message import BeginMessage
from fedbilevel.federation.privacy_ledger import Ledger
from fedbilevel.federation.private_answers import PrivateAnswers
from fedbilevel.federation.site_policy import SitePolicy

ONE = Counter({Event(1.0, 10.0): 1})
RUN = BeginMessage("mine", {}, "simfbo", {}, "float64", "a1", 0, 1.0, privacy="rows(noise=10)")


def test_a_ledger_stops_before_the_budget_is_exceeded(tmp_path):
    ledger = Ledger(tmp_path, 1.0, 1e-5)
    paid = 0
    with pytest.raises(InputError, match=r"the next answer would spend ε = 1.0.* and it allows 1 at δ = 1e-05: refused"):
        for paid in range(100):
            ledger.charge("a", b"%d" % paid, ONE)
    assert epsilon(Counter({Event(1.0, 10.0): paid}), 1e-5) <= 1.0 < epsilon(Counter({Event(1.0, 10.0): paid + 1}), 1e-5)
    again = Ledger(tmp_path, 1.0, 1e-5)
    assert again.epsilon() == ledger.epsilon() > 0.9
    again.charge("a", b"0", ONE)  # paid for
    with pytest.raises(InputError, match="refused"):
        again.charge("b", b"another run", ONE)


def test_a_plan_that_exceeds_what_is_left_is_refused_and_a_resumed_run_is_not_counted_twice(tmp_path):
    ledger = Ledger(tmp_path, 1.0, 1e-5)
    plan = Counter({Event(1.0, 10.0): 4})
    ledger.require("a", plan)
    for k in range(4):
        ledger.charge("a", b"%d" % k, ONE)
    Ledger(tmp_path, 1.0, 1e-5).require("a", plan)
    with pytest.raises(InputError, match="this run would spend"):
        ledger.require("b", plan)


def test_an_unfinished_line_stands_for_no_answer_and_a_damaged_one_stops_the_site(tmp_path):
    ledger = Ledger(tmp_path, 1.0, 1e-5)
    ledger.charge("a", b"1", ONE)
    file = tmp_path / "ledger.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"run": "a", "ans')
    restarted = Ledger(tmp_path, 1.0, 1e-5)
    restarted.charge("a", b"2", ONE)
    assert len(file.read_bytes().splitlines()) == 2
    assert ledger.epsilon() == restarted.epsilon() == epsilon(Counter({Event(1.0, 10.0): 2}), 1e-5)
    file.write_bytes(whole.replace(b"events", b"event"))
    with pytest.raises(InputError, match="ledger is damaged"):
        Ledger(tmp_path, 1.0, 1e-5).epsilon()


CHARGING = """
import sys
from collections import Counter
from pathlib import Path
from fedbilevel.core.privacy_accounting import Event
from fedbilevel.federation.privacy_ledger import Ledger
ledger = Ledger(Path(sys.argv[1]), None, 1e-5)
for k in range(10**6):
    ledger.charge("a", str(k).encode(), Counter({Event(1.0, 10.0): 1}))
    print(k, flush=True)
"""


def test_a_killed_process_has_paid_for_all_that_it_answered(tmp_path):
    with subprocess.Popen([sys.executable, "-c", CHARGING, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        answered = [int(next(process.stdout)) for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        answered += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    assert process.returncode == -signal.SIGKILL
    ledger = Ledger(tmp_path, None, 1e-5)
    assert ledger.epsilon() >= epsilon(Counter({Event(1.0, 10.0): len(answered)}), 1e-5)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert len(answered) <= len(lines) <= len(answered) + 1


def sites(folder, most):
    """Two clients with ledgers, and the engine that asks them."""
    algorithm, start = fb.SimFBO(), (jnp.zeros(3), jnp.zeros(3))
    private = population(noise=10.0)
    known = call_shapes(algorithm, private, *start)
    runtimes, answers = {}, []
    for m in range(2):
        own = private.only(m)
        ledger = Ledger(folder / str(m), most, 1e-5)
        answers.append(PrivateAnswers(dataclasses.replace(RUN, number=m), algorithm, own, known, ledger))
        runtimes[m] = ClientRuntime(algorithm, own, m, 1.0, known, None, Mean(), None, answers[-1])
    engine, _ = deployed(algorithm, private, Everyone(), start)
    engine.exchange.transport = Loopback(runtimes)
    return engine, answers, algorithm, start


def stepped(folder, most, steps=1):
    engine, _, algorithm, start = sites(folder, most)
    state = engine.init(algorithm, *start, key(0)).state
    for t in range(steps):
        state = engine.step(algorithm, state, key(t)).state
    return np.asarray(state.x)


def test_a_site_draws_its_own_noise_and_repeats_an_answer_without_paying_again(tmp_path):
    first = stepped(tmp_path / "a", None)
    spent = Ledger(tmp_path / "a" / "0", None, 1e-5).epsilon()
    np.testing.assert_array_equal(stepped(tmp_path / "a", None), first)  # after a restart
    assert Ledger(tmp_path / "a" / "0", None, 1e-5).epsilon() == spent > 0
    assert np.abs(stepped(tmp_path / "b", None) - first).max() > 1e-3  # other secrets, though the server's keys are the same
    assert (tmp_path / "a" / "0" / "secret").stat().st_mode & 0o077 == 0


OTHER = dict(
    number=1,
    sites=((1,), (2,)),
    weight=2.0,
    aggregate="sign",
    fit="{}",
    weights=(1.0, 2.0),
    precision="float32",
    knobs={"a": 1},
    identity="b2",
)


def test_a_question_with_another_answer_is_paid_for(tmp_path):
    """Whatever a server changes in the message that begins the run, it gets no second noise for a question for nothing."""
    algorithm, own = fb.SimFBO(), population(noise=10.0).only(0)
    known = call_shapes(algorithm, own, jnp.zeros(3), jnp.zeros(3))

    def asked(**changes):
        answers = PrivateAnswers(dataclasses.replace(RUN, **changes), algorithm, own, known, Ledger(tmp_path, None, 1e-5))
        made = answers.key("evaluate", np.zeros(2, np.uint32), (jnp.zeros(3), jnp.zeros(3))).tolist()
        return made, len((tmp_path / "ledger.jsonl").read_text().splitlines())

    first, _ = asked()
    assert asked(planned={"evaluate": 9}, names=("a", "b")) == (first, 1)  # as a resumed run may have them
    for paid, (name, value) in enumerate(OTHER.items(), 2):
        again, lines = asked(**{name: value})
        assert again != first and lines == paid, name


def test_sites_stop_a_run_before_their_budget_is_exceeded(tmp_path):
    with pytest.raises(RuntimeError, match="the next answer would spend"):
        stepped(tmp_path, 1.2, steps=20)
    assert 0.6 < Ledger(tmp_path / "0", None, 1e-5).epsilon() <= 1.2
    _, answers, *_ = sites(tmp_path, 1.2)
    with pytest.raises(InputError, match="this run would spend"):
        answers[0].require({"direction_sum": 20, "evaluate": 3})
    with pytest.raises(InputError, match="not those of its algorithm"):
        answers[0].require({"secret_sum": 1})


def test_a_policy_with_a_budget_refuses_runs_without_privacy_and_tables():
    policy = SitePolicy(epsilon=8.0)
    with pytest.raises(InputError, match=r"insists on privacy of its rows \(ε = 8 in all\), .*: add --epsilon"):
        policy.agree(fb.SimFBO(), Mean())
    policy.agree(fb.SimFBO(), Mean(), private_rows=True)
    with pytest.raises(InputError, match="preprocessed from its exact sums"):
        policy.agree_to_open_sums()
    with pytest.raises(InputError, match="epsilon must be above 0"):
        SitePolicy(epsilon=0.0)


class Kits:
    """Kits of one site, one in each federation that it takes part in, whose `site.toml` is the same."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        self.patch.setattr(site, "keep_compiled", lambda kit: None)

    def begun(self, federation, policy, rounds=3):
        """What the site says to a run of so many rounds that keeps its rows private."""
        kit = self.folder / federation
        (kit / "local").mkdir(parents=True, exist_ok=True)
        (kit / "local" / "site.toml").write_text(f'task = "quadratic"\nloader = "share"\n[policy]\n{policy}\n')
        workspace = SimpleNamespace(get_root_dir=lambda: str(kit))
        self.patch.setattr(site, "collab", SimpleNamespace(caller="server", workspace=workspace))
        here = site.Site()
        here.prepare()
        knobs = {"clients": 2, "noise": 0.1, "rows": 32}
        run = BeginMessage("quadratic", knobs, "simfbo", {}, "float64", "ab", 0, 1.0, names=("a", "b"))
        return here.begin(dataclasses.replace(run, privacy="rows(noise=5)", planned={"direction_sum": rounds}).encoded())


def test_a_new_kit_does_not_begin_a_new_budget_by_itself(tmp_path, monkeypatch, caplog):
    kits = Kits(tmp_path, monkeypatch)
    done, kind, line = kits.begun("first", "epsilon = 8")
    assert (done, kind) == (False, "refused") and line.endswith("no ledger of what it has spent; its log says how to begin one")
    assert (
        str(tmp_path) not in line
        and f"install -m600 /dev/null {tmp_path / 'first' / 'privacy' / 'ledger.jsonl'}" in caplog.text
    )
    assert not (tmp_path / "first" / "privacy").exists()
    (tmp_path / "first" / "privacy").mkdir()
    (tmp_path / "first" / "privacy" / "ledger.jsonl").touch()
    assert kits.begun("first", "epsilon = 8")[0]
    assert not kits.begun("again", "epsilon = 8")[0]  # the federation was created again
    shutil.copytree(tmp_path / "first" / "privacy", tmp_path / "again" / "privacy")
    assert kits.begun("again", "epsilon = 8")[0]
    assert kits.begun("without", "")[0]  # a budget


def test_federations_over_the_same_rows_have_one_budget(tmp_path, monkeypatch):
    kits, policy = Kits(tmp_path, monkeypatch), f'epsilon = 2\nledger = "{tmp_path}/rows"'
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "ledger.jsonl").touch()
    Ledger(tmp_path / "rows", None, 1e-5).charge("cd", b"1", Counter({Event(1.0, 3.0): 20}))
    for name in ("first", "second"):
        done, _, line = kits.begun(name, policy)
        assert not done and "this run would spend" in line and not (tmp_path / name / "privacy").exists()
    assert kits.begun("second", 'epsilon = 20\nledger = "../../rows"')[0]  # from site.toml
