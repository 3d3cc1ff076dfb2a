"""Few-shot hyper-representation: a backbone for all clients with which each of their tasks is learned from a few examples.

J. Li, F. Huang and H. Huang, NeurIPS 2023, section 5.2 and appendix B.2. Client m has N-way K-shot tasks n = 1..T: N random
classes of its own, K training and some validation images of each. x is the backbone of four convolutions, and the
linear classifiers y_mn stay with the client:

    min_x  Σ_m mean_n ℓ(x, y_mn(x); validation images of task n)/M,    y_mn(x) = argmin_y  ℓ(x, y; training images) + λ |y|²

A client's lower loss is the sum over its tasks, so that the step of each classifier does not depend on their number. In a
minibatch of b tasks each counts T/b times: the steps γ on the classifiers and τ of the Neumann series that suit all tasks
at once must then be scaled by b/T, or they diverge.

Omniglot's characters, in four rotations each, are dealt by alphabets; MiniImageNet by classes. The test accuracy is that
on tasks of alphabets or classes that no client has, each with a fully trained classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from fedbilevel.core import randomness
from fedbilevel.core.devices import require_memory
from fedbilevel.core.population import Population
from fedbilevel.core.problem import from_trees
from fedbilevel.errors import InputError
from fedbilevel.settings import choice, count, flag, real
from fedbilevel.tasks.base import STORM, Better, Holdings, SuitedTable, Task, suit
from fedbilevel.tasks.classification import cross_entropy, squared_norm
from fedbilevel.tasks.data import datasets, partition
from fedbilevel.tasks.declare import task
from fedbilevel.tasks.models import conv4

NEUMANN = dict(tau=0.4, neumann_order=5)
AT_ONCE = 2**28  # bytes of maps of one client's tasks
TRAINED = 200  # accelerated steps for the classifier of an unseen task


class Tasks(NamedTuple):
    """A row is one side, training or validation, of one task."""

    images: ArrayLike  # (tasks, images, height, width[, channels])
    labels: ArrayLike  # (tasks, images), 0 to N - 1
    place: ArrayLike  # the task's classifier among the client's


@task
class FewShot:
    """Learn a backbone for all clients with which each of their few-shot tasks is learned from a few examples."""

    headline: ClassVar[str] = "test_accuracy"
    better: ClassVar[Better] = {"test_accuracy": "higher", "validation_error": "lower"}
    suited: ClassVar[SuitedTable] = {
        "few-shot": suit(
            "by trial on the glyphs",
            fedbioacc_local=dict(eta=0.1, gamma=0.4, **NEUMANN, **STORM),
            fedbio_local=dict(eta=0.1, gamma=0.4, **NEUMANN),
            distbioacc=dict(eta=0.3, gamma=0.4, **NEUMANN, **STORM),
            distbio=dict(eta=0.3, gamma=0.4, **NEUMANN),
        ),
        "few-shot-omniglot": {
            **suit(
                "Li et al., appendix B.2",
                fedbioacc_local=dict(delta=2, offset=10_000, c_nu=100, c_omega=100, tau=0.5, eta=1, gamma=0.4),
            ),
            **suit(
                "Li et al., appendix B.2, but for η = 1, which diverged on the alphabets tried",
                fedbio_local=dict(gamma=0.4, eta=0.1, tau=0.5),
            ),
        },
        "few-shot-mini-imagenet": suit(
            "Li et al., appendix B.2; not tried",
            fedbio_local=dict(gamma=0.05, eta=0.1, tau=0.01),
            fedbioacc_local=dict(delta=2, offset=10_000, c_nu=100, c_omega=100, tau=0.01, eta=1, gamma=0.05),
        ),
    }

    dataset: str = choice("glyphs", "the images", datasets.CLASSES)
    ways: int = count(5, "N, classes per task", least=2)
    shots: int = count(1, "K, training images per class")
    validation_shots: int = count(5, "validation images per class; the paper's: 15")
    clients: int = count(2, "number of clients; the paper's: 11 on Omniglot, 4 on MiniImageNet")
    train_groups: int = count(4, "alphabets (Omniglot: 33) or classes (MiniImageNet: 64) that the clients hold")
    spared_groups: int = count(0, "alphabets or classes kept for tuning and not used here (Omniglot: 5)", least=0)
    tasks: int = count(16, "T, tasks per client")
    test_tasks: int = count(20, "tasks of unseen alphabets, for the test accuracy")
    rotations: bool = flag(True, "whether a class rotated by 90, 180 or 270 degrees is another class")
    filters: int = count(16, "filters of each convolution; the paper's: 64")
    halving: str = choice("stride", "how convolutions halve their maps: by stride, or by pooling", ("stride", "pooling"))
    rc: float = real(0.01, "λ, weight of |y|²", above=0)
    batch_size: int = count(0, "b, tasks in a minibatch, for which γ and τ must be scaled by b/T; 0: all", least=0)
    data_seed: int = count(0, "random seed of the split, the tasks and the initial model", least=0)

    def build(self, data: str = "") -> Task:
        """The task; `data` is the folder of data sets that are not bundled."""
        source: datasets.Classes = datasets.load(self.dataset, data)
        held, unseen = self.dealt(source)
        images = (self.clients * self.tasks + self.test_tasks) * self.ways * (self.shots + self.validation_shots)
        needed = images * source.images[0].nbytes + 4 * 27 * self.filters**2
        require_memory("few-shot", needed, "lower tasks, test_tasks or filters")
        train, validation, drawn = zip(
            *(self._tasks(source, classes, self.tasks, (self.data_seed, m)) for m, classes in enumerate(held)), strict=True
        )
        blocks = conv4.init(randomness.key(self.data_seed), int(np.prod(source.images.shape[3:])), self.filters)

        def features(x: Any, images: ArrayLike) -> Array:
            """(images, features): those of one task's images, and a last one that is always 1."""
            pixels = jnp.asarray(images).astype(float) / 255
            maps = conv4.apply(x, pixels.reshape(*pixels.shape[:3], -1), strided=self.halving == "stride")
            return jnp.concatenate([maps, jnp.ones((len(maps), 1))], 1)

        maps = 36 * self.filters * source.images[0].size  # bytes of the patches of one image's first maps, in float32
        scale = 1 if self.halving == "pooling" else 4
        at_once = max(1, AT_ONCE * scale // (maps * self.ways * (self.shots + self.validation_shots)))

        def over_tasks(of: Callable[..., Array], rows: Tasks) -> Array:
            """`of` for every task, as many at once as memory allows, with maps recomputed for derivatives."""
            if len(rows.place) <= at_once:  # type: ignore[arg-type]
                return jax.vmap(of)(*rows)
            return lax.map(lambda row: jax.checkpoint(of)(*row), tuple(rows), batch_size=at_once)

        def each(x: Any, y: Array, rows: Tasks) -> Array:
            """The loss of every task in the rows."""
            return over_tasks(lambda images, labels, place: cross_entropy(features(x, images) @ y[place], labels).mean(), rows)

        def f(x: Any, y: Array, rows: Tasks) -> Array:
            return each(x, y, rows).mean()

        def g(x: Any, y: Array, rows: Tasks) -> Array:
            return self.tasks * (each(x, y, rows) + self.rc * jax.vmap(squared_norm)(y[rows.place])).mean()

        width = jax.eval_shape(features, blocks, source.images[:2]).shape[1]
        start = jnp.zeros((self.tasks, width, self.ways))
        problem, x0, y0, backbone, classifiers = from_trees(f, g, blocks, start)

        def validation_error(x: Array, y: Array, rows: Tasks) -> Array:
            blocks, heads = backbone(x), classifiers(y)
            wrong = lambda images, labels, place: (features(blocks, images) @ heads[place]).argmax(1) != labels  # noqa: E731
            return jnp.mean(over_tasks(wrong, rows))

        problem = replace(problem, metrics=(("validation_error", validation_error),))
        population = Population.build(problem, validation, train, batch_size=self.batch_size or None)
        known, asked, _ = self._tasks(source, unseen, self.test_tasks, (self.data_seed, len(held)))
        test = jax.tree.map(jnp.asarray, (known.images, known.labels, asked.images, asked.labels))

        def metrics(x: Array, y: Array) -> dict[str, Array]:
            blocks = backbone(x)

            def unseen_task(task: tuple[Array, ...]) -> Array:
                images, labels, asked, answers = task
                y = trained_classifier(features(blocks, images), labels, self.ways, self.rc)
                return jnp.mean((features(blocks, asked) @ y).argmax(1) == answers)

            return {"test_accuracy": lax.map(unseen_task, test).mean()}

        columns, unit = (np.arange(len(source.group)), "class") if self._by_class else (source.group, "alphabet")
        names = [f"{c}" for c in columns] if self._by_class else list(source.groups)
        counts = np.stack([np.bincount(columns[d], minlength=len(names)) for d in drawn])
        shots = {"training": self.shots * counts, "validation": self.validation_shots * counts}
        return Task(population, x0, y0, metrics, "local", holdings=Holdings(tuple(names), shots, unit))

    @property
    def _by_class(self) -> bool:
        """Whether clients are dealt classes rather than alphabets."""
        return self.dataset == "mini-imagenet"

    def dealt(self, source: datasets.Classes) -> tuple[list[np.ndarray], np.ndarray]:
        """The classes that each client holds, and those that no client holds."""
        classes = np.arange(len(source.group))
        unit = classes if self._by_class else source.group
        units = np.random.default_rng(self.data_seed).permutation(np.unique(unit))
        pool = unseen = units
        if self._by_class and len(source.groups) > 1:  # the set's own split: tested on its validation classes, as in the paper
            names = np.asarray(source.groups)[source.group]
            pool, unseen = (units[names[units] == name] for name in ("train", "validation"))
        held = pool[: self.train_groups]
        unseen = np.setdiff1d(unseen, pool[: self.train_groups + self.spared_groups])
        if not len(unseen) or len(held) < self.train_groups:
            raise InputError(
                f"few-shot: {self.dataset} has {len(pool)} {'classes' if self._by_class else 'alphabets'} available; "
                f"{self.train_groups} to train on and {self.spared_groups} spared leave none to test on: lower one of the two"
            )
        mine = classes[np.isin(unit, held)]
        parts = [mine[part] for part in partition.groups(unit[mine], self.clients, self.data_seed)]
        return parts, classes[np.isin(unit, unseen)]

    def _tasks(
        self, source: datasets.Classes, classes: np.ndarray, tasks: int, seed: tuple[int, int]
    ) -> tuple[Tasks, Tasks, np.ndarray]:
        """Random tasks of some classes: their training side, their validation side, and the classes drawn."""
        rng = np.random.default_rng(seed)
        turns = 4 if self.rotations else 1
        wanted = self.shots + self.validation_shots
        if len(classes) * turns < self.ways:
            raise InputError(
                f"few-shot: {self.ways} ways, but a client has only {len(classes) * turns} classes: lower ways or clients"
            )
        starts = np.searchsorted(source.labels, np.arange(len(source.group) + 1))
        fewest = int(np.diff(starts).min())
        if fewest < wanted:
            raise InputError(
                f"few-shot: {self.shots} shots and {self.validation_shots} validation images per class, but one has {fewest} "
                "images: lower one of the two"
            )
        images, drawn = [], []
        for _ in range(tasks):
            for pick in rng.choice(len(classes) * turns, self.ways, replace=False):
                c, turn = classes[pick // turns], pick % turns
                chosen = starts[c] + rng.choice(starts[c + 1] - starts[c], wanted, replace=False)
                images.append(np.rot90(source.images[chosen], turn, axes=(1, 2)))
                drawn.append(c)
        rows = np.stack(images).reshape(tasks, self.ways, wanted, *source.images.shape[1:])

        def side(part: slice) -> Tasks:
            one = rows[:, :, part]
            labels = np.broadcast_to(np.arange(self.ways, dtype=np.int32)[None, :, None], one.shape[:3])
            flat = (tasks, self.ways * one.shape[2])
            return Tasks(one.reshape(*flat, *one.shape[3:]), labels.reshape(flat), np.arange(tasks, dtype=np.int32))

        return side(slice(self.shots)), side(slice(self.shots, None)), np.asarray(drawn)


def trained_classifier(features: Array, labels: Array, ways: int, rc: float) -> Array:
    """The classifier that minimises the cross-entropy and rc |y|², by Nesterov's method for strongly convex functions."""
    curvature = jnp.linalg.norm(features @ features.T, 2) / (2 * len(features)) + 2 * rc  # an upper bound, of the whole loss
    condition = jnp.sqrt(2 * rc / curvature)
    momentum = (1 - condition) / (1 + condition)
    slope = jax.grad(lambda y: cross_entropy(features @ y, labels).mean() + rc * squared_norm(y))

    def step(_: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        y, ahead = pair
        new = ahead - slope(ahead) / curvature
        return new, new + momentum * (new - y)

    zero = jnp.zeros((features.shape[1], ways))
    return lax.fori_loop(0, TRAINED, step, (zero, zero))[0]
