"""What a task is: a problem with its data, starting point and metrics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.algorithms import ALGORITHMS, DEFAULTS, called
from fedbilevel.algorithms.base import Algorithm
from fedbilevel.core import ground_truth
from fedbilevel.core.client_lists import one_per_client
from fedbilevel.core.population import Population, Shards
from fedbilevel.core.problem import Loss, LowerLevel, Tree, from_trees, mean_loss
from fedbilevel.core.sets import EVERYWHERE, UNCONSTRAINED, ConvexSet, Sets
from fedbilevel.errors import InputError, computing, require
from fedbilevel.tasks.data.columns import Columns
from fedbilevel.tasks.data.preprocessing import Preprocessing
from fedbilevel.tasks.shown import Shown, nothing

Metrics = Callable[[Array, Any], dict[str, Array]]
Better = Mapping[str, Literal["higher", "lower"]]  # metric -> which of its values are better


class Holdings(NamedTuple):
    """Who holds what: for each purpose, such as training, how many samples of which class every client has."""

    classes: tuple[str, ...]
    counts: Mapping[str, np.ndarray]  # purpose -> (clients, classes)
    unit: str = "class"  # what a column is


class Suited(NamedTuple):
    """Hyperparameters of an algorithm that suit a task, and where they come from."""

    values: Mapping[str, Any]
    source: str


SuitedTable = Mapping[str, Mapping[str, Suited]]  # name of the task -> name of the algorithm -> hyperparameters


def suited_to(table: SuitedTable, task: str, algorithm: str) -> Suited:
    """What suits a task, or the first of its kind if nothing is known about the task itself."""
    for by_algorithm in (table.get(task, {}), *list(table.values())[:1]):
        if algorithm in by_algorithm:
            return by_algorithm[algorithm]
    return Suited({}, "")


def suit(source: str, **values: Mapping[str, Any]) -> dict[str, Suited]:
    """Hyperparameters from one source, by algorithm, with _ for - in its name."""
    return {name.replace("_", "-"): Suited(given, source) for name, given in values.items()}


STORM = dict(c_nu=0.2, c_omega=0.2, delta=30, offset=10_000)  # the momenta of Li et al., NeurIPS 2023, appendix B.1
THREE_ROUNDS = dict(lower_rounds=3, neumann_terms=5)  # for the double-loop methods, with a short Neumann series


def recipe(source: str, *, x: float, y: float, smoothness: float) -> dict[str, Suited]:
    """Hyperparameters for all algorithms with a global lower level, from the steps on x and y and the smoothness of g in y."""
    local = dict(tau=1 / smoothness, neumann_order=5, **STORM)
    double_loop = dict(alpha=x, beta=y, smoothness=smoothness, **THREE_ROUNDS)
    return suit(
        source,
        fedbioacc=dict(eta=x, gamma=y, tau=y / 2, c_u=0.2, **STORM),
        fedbio=dict(eta=x, gamma=y, tau=y / 2),
        simfbo=simfbo_steps(x, y, y / 2),
        shrofbo=simfbo_steps(x, y, y / 2),
        mefbo=dict(mefbo_steps(3 * x, y, y), penalty=3, growth=0.01),
        fedmbo=double_loop,
        fednest=double_loop,
        lfednest=double_loop,
        stocbio=double_loop,
        commfedbio=dict(alpha=x, beta=y, tau=y / 2, lower_rounds=3, system_rounds=3),
        fbo_aggitd=dict(alpha=x, beta=y, neumann_step=1 / smoothness),
        local_bsgvr=dict(eta=x, gamma=y, **local),
        adafbio=dict(eta=x / 10, gamma=y / 10, **local),
        mrbo=dict(eta=x, gamma=y, **local),
        fedavg=dict(gamma=y),
    )


def simfbo_steps(x: float, y: float, u: float) -> dict[str, float]:
    """SimFBO's steps, with the same sizes at the clients and the server."""
    return dict(eta_x=x, eta_y=y, eta_u=u, gamma_x=x, gamma_y=y, gamma_u=u)


def mefbo_steps(x: float, y: float, theta: float) -> dict[str, float]:
    """MeFBO's steps, with the same sizes at the clients and the server."""
    return dict(eta_x=x, eta_y=y, eta_theta=theta, lambda_x=x, lambda_y=y, lambda_theta=theta)


def as_it_is(vector: Any) -> Any:
    """The vector unchanged, for tasks whose x or y is a vector for the user too."""
    return vector


class Declared(NamedTuple):
    """What a task was built from."""

    settings: Any  # an instance of what `@task` made, with its knobs
    data: str | None  # the full path of the folder of data sets; None if it was given rows that no folder holds
    found: tuple[int, ...] = ()  # rows that were here, by call of `ClientData.each`


class Validation(NamedTuple):
    """Rows that are held out of both losses, and the mean over them that hyperparameters are chosen by."""

    name: str
    loss: Loss
    rows: Shards
    owners: Array  # the client of each shard
    higher: bool  # whether higher values are better


@dataclasses.dataclass(frozen=True)
class Task:
    """A federated bilevel problem that an experiment can run.

    Its metrics are the problem's own, on the clients' data, and those that `metrics(x, y)` returns without looking at any
    client's data, so that a server can compute them; there `y` has a row per client if the lower level is local, and `x` has
    one if each client has its own.
    `strongly_convex` says whether Σ w_m g_m is strongly convex in y, which most methods assume.
    `shown(x)` is what a report shows of an x that a run has found.
    `x_tree` and `y_tree` give x and y as the user's trees.
    `declared` says what it was built from, where a user's function or class with `@task` built it.
    `notes` are sentences about where its metrics come from.
    `known_means` says whether both losses are known to be means over their rows; a run checks others.
    `preprocessing` is what has turned tables into its rows, which a run keeps beside x and y.
    `validation` has rows that are held out to choose hyperparameters, or a round, by.
    """

    population: Population
    x: Array
    y: Array
    metrics: Metrics
    lower_level: LowerLevel = "global"
    strongly_convex: bool = True
    holdings: Holdings | None = None
    shown: Callable[[np.ndarray], Sequence[Shown]] = nothing
    x_tree: Callable[[Array], Tree] = as_it_is
    y_tree: Callable[[Any], Tree] = as_it_is
    known_means: bool = True
    declared: Declared | None = None
    notes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    validation: Validation | None = None

    @classmethod
    def of(
        cls,
        f: Loss,
        g: Loss,
        x0: Tree,
        y0: Tree,
        *,
        lower: Iterable[Tree],
        upper: Iterable[Tree] | None = None,
        test: Iterable[Tree] | None = None,
        batch_size: int | None = None,
        weights: Iterable[float] | None = None,
        x_set: ConvexSet = EVERYWHERE,
        y_set: ConvexSet = EVERYWHERE,
        metrics: Callable[[Tree, Tree], dict[str, Array]] | None = None,
        row_metrics: Mapping[str, Loss] | None = None,
        lower_metrics: Mapping[str, Loss] | None = None,
        lower_level: LowerLevel = "global",
        strongly_convex: bool = True,
        shown: Callable[[Tree], Sequence[Shown]] = nothing,
        preprocessing: Preprocessing | None = None,
        own_x: bool = False,
    ) -> Task:
        """A task from two losses on trees, a start and each client's rows.

        Args:
            f, g, x0, y0, lower, upper, batch_size, weights, x_set, y_set, metrics, preprocessing: as in `fedbilevel.solve`.
            row_metrics: further means over f's rows by name, each `(x, y, rows) -> number`, which the clients compute.
            lower_metrics: likewise over g's rows.
            test: for each client rows like those of f, which neither loss sees. On them the clients compute `test_loss`, which
                is f, and `test_NAME` for each of the row metrics; each is a mean over all of these rows.
            lower_level: the problem that y solves: "global" for that of all clients, "local" for each client's own.
            strongly_convex: whether Σ w_m g_m is strongly convex in y, which most methods assume.
            shown: what a report shows of an x that a run has found, as sections (`fedbilevel.tasks.shown`).
            own_x: whether each client has an x of its own, such as a weight for each of its rows, which stays there. All start
                from x0, the losses are given the client's own, and solutions have them with a leading axis over clients.

        Raises:
            InputError: something given cannot be used.
        """
        for name, function in (("metrics", metrics), ("shown", shown)):
            require(function is None or callable(function), name, "a function", function)
        require(lower_level in ("global", "local"), "lower_level", "global or local", lower_level)
        for name, given_metrics in (("row_metrics", row_metrics), ("lower_metrics", lower_metrics)):
            require(isinstance(given_metrics, Mapping | None), name, "a dictionary of functions by name", given_metrics)
        given = isinstance(preprocessing, Preprocessing | None)
        require(given, "preprocessing", "that of Tables, such as tables(...).preprocessing", preprocessing)
        sets = Sets(x_set, y_set)
        further = tuple((row_metrics or {}).items())
        tests = {"test_loss": f} | {f"test_{name}": loss for name, loss in further}
        apart = tuple((name, loss) for name, loss in tests.items() if name not in dict(further))
        require(isinstance(own_x, bool), "own_x", "True or False", own_x)
        if own_x and lower_level == "local":
            raise InputError("own_x is for a y that all clients share: leave out own_x, or lower_level")
        problem, x, y, x_tree, y_tree = from_trees(f, g, x0, y0, sets, further, apart, tuple((lower_metrics or {}).items()))
        lower = one_per_client("lower", lower)
        starts = x if own_x else None
        population = Population.build(problem, lower if upper is None else upper, lower, weights, batch_size, test, starts)
        x_trees = jax.vmap(x_tree) if own_x else x_tree
        y_trees = jax.vmap(y_tree) if lower_level == "local" else y_tree

        def own_metrics(x: Array, y: Array) -> dict[str, Array]:
            return metrics(x_trees(x), y_trees(y)) if metrics else {}

        return cls(
            population,
            x,
            y,
            own_metrics,
            lower_level,
            strongly_convex,
            _rows_held(upper=population.upper, lower=population.lower),
            lambda x: shown(jax.tree.map(np.asarray, x_trees(jnp.asarray(x)))),
            x_trees,
            y_trees,
            known_means=False,
            preprocessing=preprocessing,
        )

    @functools.cached_property
    def evaluate(self) -> Callable[[Array, Any], dict[str, Array]]:
        """All metrics at (x, y), compiled once for all runs on the task."""

        def evaluate(x: Array, y: Any) -> dict[str, Array]:
            on_data = ground_truth.metrics(self.population, x, y, self.lower_level)
            problem = self.population.problem
            known = dict(zip(problem.metric_names, on_data, strict=True))
            if self.population.test is not None:
                on_test = ground_truth.tests(self.population, x, y, self.lower_level)
                known |= dict(zip(problem.test_names, on_test, strict=True))
            if self.validation is not None:
                name, loss, rows, owners, _ = self.validation
                mean = functools.partial(mean_loss, loss)
                known[name] = ground_truth.held_out(mean, rows, owners, x, y, self.lower_level)
            return {**known, **_own_metrics(self.metrics, x, y, known)}

        return jax.jit(evaluate)

    @functools.cached_property
    def at_start(self) -> dict[str, Array]:
        """All metrics where x and y start, computed once for all runs on the task."""
        return self.evaluate(*self.start)

    def metric_names(self) -> list[str]:
        """The names of all metrics, without computing them."""
        return self._names(self.evaluate)

    def server_metric_names(self) -> list[str]:
        """The names of those that `metrics` returns."""
        return self._names(self.metrics)

    @property
    def own_x(self) -> bool:
        """Whether each client has an x of its own."""
        return self.population.own_x is not None

    @property
    def start(self) -> tuple[Array, Array]:
        """Where x and y start, as metrics take them: with a row per client where each has its own."""

        def each(v: Array, own: bool) -> Array:
            return jnp.broadcast_to(v, (self.population.size, *v.shape)) if own else v

        return each(self.x, self.own_x), each(self.y, self.lower_level == "local")

    @property
    def default_algorithm(self) -> str:
        """The name of the algorithm for those who name none."""
        return DEFAULTS["own x" if self.own_x else self.lower_level]

    def require_kind(self, algorithm: Algorithm) -> None:
        """Raise `InputError` unless the algorithm is for tasks of this kind."""
        kind = type(algorithm)
        if kind.lower_level != self.lower_level:
            suited = [name for name, entry in ALGORITHMS.bundled.items() if entry.load().lower_level == self.lower_level]
            raise InputError(
                f"{called(algorithm)} is for a {kind.lower_level} lower level, but the task has a {self.lower_level} one: "
                f"choose one of {', '.join(suited)}"
            )
        if kind.own_x != self.own_x:
            held = "an x that all clients share", "an x per client"
            raise InputError(
                f"{called(algorithm)} is for {held[kind.own_x]}, but the task has {held[self.own_x]}: choose "
                f"{self.default_algorithm}"
            )
        if self.population.problem.sets != UNCONSTRAINED and not kind.constrained:
            raise InputError(
                f"{called(algorithm)} does not keep x and y in given sets: choose an algorithm that projects (MeFBO), "
                "or drop the constraints"
            )

    def _names(self, of: Metrics) -> list[str]:
        return list(jax.eval_shape(of, *jax.eval_shape(lambda: self.start)))

    @functools.cached_property
    def evaluate_each(self) -> Callable[[Array, Any], dict[str, Array]]:
        """All metrics at every row of stacked x and y, one after another."""
        return jax.jit(lambda xs, ys: lax.map(lambda pair: self.evaluate(*pair), (xs, ys)))


def _rows_held(**shards: Shards) -> Holdings:
    """How many rows every client holds."""
    return Holdings(("rows",), {level: np.asarray(of.size)[:, None] for level, of in shards.items()}, unit="kind")


class TaskSettings(Protocol):
    """The class of a task: its knobs, and what is known about its metrics."""

    headline: ClassVar[str]  # the metric to compare methods by
    better: ClassVar[Better]  # for its metrics; any other, such as either loss, is better lower
    suited: ClassVar[SuitedTable]  # the first task's serve the others where those have none of their own
    columns: Columns | None  # of the tables that it is built from, if it is; a property if its knobs say which

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""


Judged = TaskSettings | type[TaskSettings]  # what knows a task's headline


def unusable(metric: object, why: str) -> InputError:
    """The error of a metric that a run cannot have."""
    return InputError(f"the metric {metric!r} must be one number under a name of its own: {why}")


def _own_metrics(metrics: Metrics, x: Array, y: Any, taken: Container[str]) -> dict[str, Array]:
    """What a task's metrics are at (x, y); `InputError` unless they are single numbers under names of their own."""
    with computing("metrics(x, y)"):
        given = metrics(x, y)
    require(isinstance(given, Mapping), "what metrics(x, y) returns", "a dictionary of numbers by name", given)
    with computing("metrics(x, y)"):
        own = {name: jnp.asarray(_as_float(value)) for name, value in given.items()}
    for name, value in own.items():
        is_real = value.dtype == bool or any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.integer, jnp.floating))
        if value.shape != () or not is_real:
            raise unusable(name, f"it is {value.dtype}{list(value.shape)}")
        if not isinstance(name, str) or name in taken:
            raise unusable(name, "the problem has that name for another one" if name in taken else "that is no text")
    return own


def _as_float(value: Any) -> Any:
    """A whole number that is known already as a float, since JAX's whole numbers may be too short for it; others unchanged."""
    plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    return float(plain) if isinstance(plain, int) else value
