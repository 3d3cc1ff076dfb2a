"""FedPace-Own: FedPace where every client has an x of its own, which never leaves it, and all share y.

Ours; docs/cleaning.md says what it is for. In

    min  Σ_m w_m f_m(x_m, y*(x))    with    y*(x) = argmin_y  Σ_m w_m g_m(x_m, y),    x = (x_1, ..., x_M),

such as with a weight in x_m for each row of client m, the hypergradient's part for x_m needs only the server's y and u beside
the client's own rows: it is w_m D_m with D_m = ∇_x f_m - ∇²_xy g_m u, or FedPace's secants. So the client keeps x_m, its
momentum over the rounds that it takes part in, the best and the reported x_m. It sends what FedPace's rules need: D_y, D_u,
what it measures, f, and of D_m only the three numbers in `Heading`. The server adds these up and sends back x's step and
whether f has never been less, with which the client moves x_m, and projects it on X.

If everyone takes part, x and y are those of FedPace on all parts as one vector. A client that does not take part leaves its
x_m as it is. Clients need memory: four vectors as long as x_m, which a site also keeps on its disk for the run's checkpoints.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.base import algorithm
from fedbilevel.algorithms.fedpace import Look, Measured, Paced, reported
from fedbilevel.algorithms.fedpace import State as ServerState
from fedbilevel.algorithms.pace import Heading, average, if_any
from fedbilevel.core.clients import Client, Clients, PerClient, at_client
from fedbilevel.core.problem import Point

ELSEWHERE: Any = None  # where the server's point would have an x


class Own(NamedTuple):
    """What a client keeps."""

    x: Array  # what is reported
    at: Array  # x_m
    m: Array  # momentum of M w_m D_m
    best: Array  # x_m when f was least
    t: Array  # rounds that it has taken part in


class Shared(NamedTuple):
    """What a client sends."""

    y: Array  # D_y
    u: Array  # D_u
    seen: Measured
    loss: Array
    heading: Heading  # of M w_m D_m, divided by M w_m


class State(NamedTuple):
    """What the clients keep, and what the server knows."""

    own: PerClient
    server: ServerState

    @property
    def x(self) -> PerClient:
        """What the clients report, which stays there."""
        return self.own[0]

    @property
    def y(self) -> Array:
        """What is reported."""
        return self.server.y


@algorithm
class FedPaceOwn(Paced):
    """FedPace on an x in parts, each of which a client keeps to itself; needs no tuning."""

    own_x: ClassVar[bool] = True
    private: ClassVar[tuple[type, ...]] = (Own,)

    @at_client
    def look(self, client: Client, y: Array) -> Look:
        """The curvatures of g in y and the first gradients, on a minibatch, at the client's own start."""
        return self.first_look(client, _start(client), y)

    @at_client
    def begin(self, client: Client) -> Own:
        """What the client keeps at the start."""
        x = _start(client)
        return Own(x, x, jnp.zeros_like(x), x, jnp.int32(0))

    @at_client
    def own_answer(self, client: Client, own: Own, y: Array, u: Array, delta: Array, secant: Array) -> tuple[Own, Shared]:
        """What the client keeps and what it sends; both stay there for now."""
        d, seen, loss = self.answer(client, Point(own.at, y, u), delta, secant)
        weight = client.weight.astype(d.x.dtype)
        m = average(self.beta, own.m, weight * d.x)
        parts = Heading.of(weight * d.x, self.along(own.t.astype(m.dtype), m), own.at, own.best)
        heading = Heading(*(part / weight for part in parts))
        return own._replace(m=m), Shared(d.y, d.u, seen, loss, heading)

    @at_client
    def share(self, client: Client, result: tuple[Own, Shared]) -> Shared:
        """The part that is sent."""
        return result[1]

    @at_client
    def move(self, client: Client, own: Own, step: Array, better: Array) -> Own:
        """x_m after a step."""
        t = own.t.astype(own.at.dtype)
        at = client.problem.sets.x.project(own.at - step * self.along(t, own.m))
        return Own(reported(t, own.x, at), at, own.m, jnp.where(better, own.at, own.best), own.t + 1)

    def init(self, x: Array, y: Array, clients: Clients) -> State:
        Y = clients.sets.y
        z = Point(ELSEWHERE, Y.project(y), jnp.zeros_like(y))
        server = self.first(z, clients.draw().mean(self.look, z.y), Y)
        return State(clients.everyone().map(self.begin), server)

    def step(self, state: State, clients: Clients, key: Array) -> State:
        own, server = state
        z, M = server.z, clients.everyone().active.size
        cohort = clients.draw()
        result = cohort.map(self.own_answer, cohort.take(own), z.y, z.u, server.delta, server.secant)
        zero = jnp.zeros_like(server.delta)
        near = Measured.nothing(z.y), server.pace.last_loss, Heading(zero, zero, zero)
        around = Shared(jnp.zeros_like(z.y), jnp.zeros_like(z.u), *near)
        got = cohort.mean(self.share, result, around=around)

        d = Point(ELSEWHERE, got.y, got.u)
        heading = got.heading._replace(dx=got.heading.dx / M, along=got.heading.along / M)
        m = average(self.beta, server.m, d)
        new, step_x, better = self.after(server, m, d, got.seen, got.loss, heading, clients)
        moved = cohort.map(self.move, result[0], step_x / M, better)
        return State(cohort.put(own, moved), if_any(cohort.active, new, server))


def _start(client: Client) -> Array:
    """x_m to begin with."""
    return client.problem.sets.x.project(client.own_x)
