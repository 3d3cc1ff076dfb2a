"""The library's front door: from two losses and the clients' data to a solution."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jax import Array

from fedbilevel.aggregations import AGGREGATIONS, configured, parts, written
from fedbilevel.algorithms import ALGORITHMS, DEFAULTS
from fedbilevel.algorithms.base import Algorithm, require_algorithm
from fedbilevel.core.aggregation import Aggregation, require_aggregation
from fedbilevel.core.participation import Participation
from fedbilevel.core.privacy import RowPrivacy
from fedbilevel.core.problem import Loss, Tree
from fedbilevel.core.sets import EVERYWHERE, ConvexSet
from fedbilevel.errors import InputError, require, warn
from fedbilevel.library.paths import path_of
from fedbilevel.library.recorded import recorded
from fedbilevel.library.solution import Solution
from fedbilevel.own_code import is_unnamed, label
from fedbilevel.registry import chosen, find
from fedbilevel.runs.advice import advice_on_data, advice_on_run
from fedbilevel.runs.best_round import EndPoint, headline_of, keeps_best
from fedbilevel.runs.experiment import Snapshot
from fedbilevel.runs.options import privacy_text
from fedbilevel.runs.simulation import simulation
from fedbilevel.tasks.base import Task
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.tasks.validation import with_validation


def solve(
    f: Loss | Task,
    g: Loss | None = None,
    x0: Tree = None,
    y0: Tree = None,
    *,
    lower: Iterable[Tree] | None = None,
    upper: Iterable[Tree] | None = None,
    algorithm: Algorithm | str | None = None,
    rounds: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    clients_per_round: int | None = None,
    participation: Participation | None = None,
    weights: Iterable[float] | None = None,
    x_set: ConvexSet = EVERYWHERE,
    y_set: ConvexSet = EVERYWHERE,
    seed: int = 0,
    every: int = 10,
    metrics: Callable[[Tree, Tree], dict[str, Array]] | None = None,
    preprocessing: Preprocessing | None = None,
    chunk_size: int | None = None,
    products: str = "default",
    loss_bound: float = 1e6,
    aggregation: Aggregation | str = "mean",
    attack: str = "",
    privacy: RowPrivacy | None = None,
    arrivals: str = "",
    keep_best: bool | None = None,
    observe: Callable[[Snapshot], None] | None = None,
    out: str | Path | None = None,
) -> Solution:
    """Solve min_x Σ w_m f_m(x, y*(x)) with y*(x) = argmin_y Σ w_m g_m(x, y) by a federated algorithm.

    Args:
        f, g: the upper and the lower loss, `(x, y, rows) -> number`, each a mean over the rows it is given, possibly with
            added terms that depend on no row. Other losses, such as sums, are refused unless every call has the same
            number of rows: all of a client's, and equally many for all clients. `f` may be a `Task` instead,
            which has its own `g`, start, rows, `batch_size`, `weights`, sets and `metrics`: leave these out.
        x0, y0: where to start, arrays or pytrees of arrays. Each array keeps its precision, also for `f` and `g`. Doubles
            need `JAX_ENABLE_X64=1`: without it they become float32, with a warning.
        lower, upper: for each client the rows of `g` and of `f`, a pytree of arrays with a row per sample;
            clients may have unequal numbers of rows. `upper` is `lower` unless given. Without `JAX_ENABLE_X64=1` doubles
            become float32, and whole numbers that need more than 32 bits are refused.
        algorithm: a name in `fedbilevel.ALGORITHMS`, or an instance; for a local lower level every client has its own y.
            Unless given, it is `FedPace`, which needs no tuning, or for a `Task` with a local lower level
            `FedPaceLocal`, and for one whose clients have an x each `FedPaceOwn`.
        rounds, steps: how long to run, in communication rounds or in outer steps of the algorithm; give one of the two.
        batch_size: rows in a minibatch; None takes all rows every time.
        clients_per_round, participation: who takes part: that many at random, or any `Participation`; everyone unless given.
        weights: the clients' weights, on any scale; equal unless given.
        x_set, y_set: a `Box`, `Ball` or `Simplex` that all entries of x (y) together must stay in; only for an algorithm
            that projects, such as `MeFBO`.
        seed: the random seed.
        every: rounds between two rows of the history.
        metrics: your own metrics, `(x, y) -> {name: number}`, besides `upper_loss`, `lower_loss`, the counters of every run
            and what the algorithm reports; these names are taken, and `absences` is too.
        preprocessing: that of the tables that the rows are from (`tables(...).preprocessing`), to keep beside the solution.
        chunk_size: how many clients are computed at once; None: all of a round, on a CPU as many as its cache holds.
        products: the arithmetic of matrix products: `default` as JAX does it on the device, `float32`, or `bfloat16`.
        loss_bound: a loss above it counts as divergence.
        aggregation: how the server aggregates the clients' answers: a name in `fedbilevel list`, with settings as in
            `"trimmed-mean(byzantine=2)"`, or an instance.
        attack: clients that lie, such as `"sign-flip:2"`.
        privacy: `RowPrivacy(epsilon=8, delta=1e-5)` adds the noise that keeps every row of the clients private, calibrated to
            the run. In a simulation it follows from the seed, so that x is private only to those who do not know that.
        arrivals: when answers come, where the aggregation does not wait for all: `"lognormal:1"`, or a recorded file.
        keep_best: hold one in five of each client's upper rows out of the losses, and take x and y from the recorded round
            that is best on these, rather than from the last; `Solution.best_round` says which. A task that is declared has
            its own headline there, if that is a mean over rows, and others f. Unless given, this is done where no algorithm is
            named and x, which f sees through y alone, has more entries than a fifth of f's rows: then x can fit these rows.
        observe: called with every snapshot of the run, about four times a second.
        out: a new folder to record the run in, as the command does, with its progress shown meanwhile. Ctrl-C leaves what is
            done. `resume` continues the run of a `Task` that a function in a file declares (`@fedbilevel.task`).

    Warns about what looks wrong, such as an x that hardly moved, once at the end, and about rows that are not scaled.

    Raises:
        InputError: something given cannot be used.
        Diverged: the iterates stopped being finite, or a loss went above its bound.
    """
    unnamed = algorithm is None
    if algorithm is None:
        algorithm = f.default_algorithm if isinstance(f, Task) else DEFAULTS["global"]
    if isinstance(algorithm, str):
        name = chosen(ALGORITHMS, algorithm)
        algorithm = find(ALGORITHMS, "algorithm", name).configure(label(name), {})
    algorithm = require_algorithm(algorithm)
    if clients_per_round is not None and participation is not None:
        raise InputError("give either clients_per_round or participation, not both")
    require(observe is None or callable(observe), "observe", "a function", observe)
    place = None if out is None else path_of("out", out)
    require(isinstance(privacy, RowPrivacy | None), "privacy", "such as RowPrivacy(epsilon=8)", privacy)
    rule: dict[str, Any] = {"aggregation": aggregation}
    if isinstance(aggregation, str):
        name, values = parts(aggregation)
        rule = {"aggregate": written(chosen(AGGREGATIONS, name), values)}
    given = dict(g=g, x0=x0, y0=y0, lower=lower, upper=upper, batch_size=batch_size, weights=weights, metrics=metrics)
    given["preprocessing"] = preprocessing
    if isinstance(f, Task):
        for name, value in {**given, "x_set": x_set, "y_set": y_set}.items():
            if value is not None and value is not EVERYWHERE:
                raise InputError(f"a Task has its own {name}: leave it out")
        task = f
    else:
        lower_level = type(algorithm).lower_level
        task = Task.of(f, x_set=x_set, y_set=y_set, lower_level=lower_level, **given)
    judged = task.declared.settings if task.declared else None
    if keep_best is None:
        how = configured(aggregation) if isinstance(aggregation, str) else require_aggregation(aggregation)
        keep_best = unnamed and keeps_best(task, judged, how, privacy is not None)
    if keep_best:
        task = with_validation(task, *headline_of(judged))
    experiment = simulation(
        task,
        algorithm,
        participation=participation,
        rounds=rounds,
        steps=steps,
        clients_per_round=clients_per_round,
        seed=seed,
        every=every,
        chunk_size=chunk_size,
        products=products,
        loss_bound=loss_bound,
        attack=attack,
        privacy=privacy_text(privacy),
        arrivals=arrivals,
        keep_best=keep_best,
        **rule,
    )
    if place is not None:
        named = participation is None and not is_unnamed(experiment.options.aggregate)
        return recorded(experiment, place, named, observe)
    for line in advice_on_data(experiment):
        warn(line)
    history: list[dict[str, float | None]] = []
    end = EndPoint(experiment)
    for moment in experiment.run():
        end.note(moment)
        if moment.metrics is not None:
            history.append(moment.row())
        if observe:
            observe(moment)
    for line in advice_on_run(experiment, history, moment.state, judged):
        warn(line)
    return Solution(**end.trees(), history=history, preprocessing=task.preprocessing, best_round=end.round)
