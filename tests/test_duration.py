"""What would take longer than anybody waits is said before it starts, or while it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rich.console import Console

import fedbilevel as fb
from fedbilevel.runs import duration, progress

LONGEST = 2**31 - 1  # of a loop


def solve(algorithm):
    def loss(x, y, rows):
        return jnp.mean((y - rows) ** 2) + x**2

    return fb.solve(loss, loss, jnp.array(1.0), jnp.zeros(300), lower=[np.ones((4, 300))] * 2, algorithm=algorithm, steps=1)


@pytest.mark.parametrize("name", ["lower_rounds", "neumann_terms"])
def test_a_step_that_takes_hours_is_refused_with_its_estimate_and_the_remedy(name):
    with pytest.raises(fb.InputError, match=rf"about \de\+\d+ operations and takes .* or more here.*lower {name}, which is 2"):
        solve(fb.FedMBO(**{name: LONGEST}, beta=1e-9))


def test_a_count_without_a_value_is_no_loop():
    @fb.algorithm
    class Capped(fb.FedMBO):
        cap: int | None = fb.count(None, "no limit unless given")

    with pytest.raises(fb.InputError, match="lower lower_rounds, which is 2"):
        solve(Capped(lower_rounds=LONGEST, beta=1e-9))


def test_a_step_of_many_short_turns_is_not_refused():
    solve(fb.FedMBO(lower_rounds=11_000, beta=0.1))


def test_the_operations_of_loops_are_counted_with_their_lengths():
    def program(a, n):
        looped = lax.fori_loop(0, 7, lambda _, b: a @ b, a)
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, looped))

    traced = jax.make_jaxpr(program)(jnp.ones((3, 3)), 5).jaxpr
    found = duration.work(traced, rounds=11)
    products, sines = 7 * 2 * 27, 11 * 9
    assert found.turns == 7 + 11 and found.large == 0
    assert products + sines <= found.small <= products + sines + 2 * 7 + 2 * 11 + 2  # the loops' counters
    large = duration.work(jax.make_jaxpr(jnp.dot)(jnp.ones((100, 100)), jnp.ones((100, 100))).jaxpr, rounds=1)
    assert large == duration.Work(large=2e6)


def counting(start, stop, step=1, also=lambda a: a[0] < 9.0):
    def program(a):
        def goes_on(c):
            return (c[0] < stop) & also(c[1])

        return lax.while_loop(goes_on, lambda c: (c[0] + step, jnp.sin(c[1])), (start, a))

    return program


@pytest.mark.parametrize(
    ("program", "turns"),
    [
        (counting(3, 20), 17),
        (counting(20, 3), 0),
        (counting(3, 20, also=lambda a: (a[0] < 9.0) | (a[1] > 0)), 17),
        (counting(3, 20, step=4), 5),
        (counting(3, 20, step=0), np.inf),
        (counting(3.0, 20.0, step=1e-30), np.inf),
        (counting(3, 20, step=-1), np.inf),
        (lambda a: counting(0, a[0])(a), np.inf),
        (lambda a: counting(a[0], 5)(a), np.inf),
        (lambda a: lax.while_loop(lambda c: (c[0] < 5) | (c[1][0] < 9.0), lambda c: (c[0] + 1, c[1]), (0, a)), np.inf),
        (lambda a: lax.while_loop(lambda c: c[1][0] < 5, lambda c: (c[0] + 1, c[1]), (0, a)), np.inf),
        (lambda a: lax.fori_loop(0, a.astype(int)[0], lambda k, v: jnp.sin(v), a), np.inf),
        (lambda a: lax.fori_loop(0, np.int32(6) % 5 + 3, lambda k, v: jnp.sin(v), a), 4),
        (lambda a: lax.scan(lambda c, _: (counting(0, 6)(c)[1], None), a, length=5)[0], 5 + 5 * 6),
        (lambda a: lax.cond(a[0] > 0, counting(0, 6), lambda a: (0, a), a), 6),
    ],
)
def test_a_loop_that_cannot_communicate_turns_as_often_as_it_can(program, turns):
    found = duration.work(jax.make_jaxpr(program)(jnp.ones(3)).jaxpr, rounds=None)
    assert found.turns == turns and (found.seconds() == np.inf) == (turns == np.inf)


def test_only_large_operations_are_split_among_cores(monkeypatch):
    monkeypatch.setattr(duration.os, "cpu_count", lambda: 4)
    assert duration.Work(small=duration.OF_A_CORE, large=duration.OF_A_CORE).seconds() == 1.25
    assert duration.Work(turns=2e9).seconds() > duration.LONGEST  # however little a turn does


def test_a_gpu_needs_time_for_every_turn(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert duration.Work(small=1e6, turns=1e9).seconds() == pytest.approx(1e9 * duration.LAUNCH, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "3 s"), (119, "119 s"), (1800, "30 minutes"), (86400 * 3, "3 days"), (1e12, "31,688 years")]
)
def test_durations_have_their_largest_unit(seconds, words):
    assert duration.in_words(seconds) == words


def test_days_that_are_left_are_said_once_as_soon_as_the_pace_is_known(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    pace = progress.Pace(Console(width=200), "simfbo", 10**6)
    assert pace.note(0) is None and pace.note(1) is None  # a start, and the first stretch, which compiles
    for done in range(2, 20):
        clock[0] += 1.0
        assert pace.note(done) == pytest.approx(10**6 - done)
    assert capsys.readouterr().out == "simfbo: at this pace the rest takes 12 days\n"
    short = progress.Pace(Console(width=200), "simfbo", 100)
    for done in range(20):
        clock[0] += 1.0
        short.note(done)
    assert capsys.readouterr().out == ""
