"""Every algorithm against a plain numpy recursion written from the papers, over a few outer steps.

Heterogeneous quadratics, all data, several local steps, unequal weights, everyone takes part. A reference yields the
leaves of the algorithm's state after each outer step, so all of the state is compared: iterates, momenta, residuals, time.
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import weighted

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.participation import Everyone
from fedbilevel.core.population import Shards
from fedbilevel.core.problem import Point, Problem
from fedbilevel.core.sets import Box, Sets
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.tasks.quadratic import RIDGE, Quadratic
from fedbilevel.tasks.valley import Valley

TASK = Quadratic(clients=4, hessian_heterogeneity=0.6, condition=4.0)
WEIGHTS = np.array([0.15, 0.4, 0.1, 0.35])
X_BOX, Y_BOX = 0.2, 0.25


class Client:
    """f_m and g_m by their derivatives."""

    def __init__(self, coefficients, m):
        self.A, self.B, self.b, self.c, self.d = (getattr(coefficients, name)[m] for name in "ABbcd")

    def f(self, x, y):
        return 0.5 * np.sum((y - self.c) ** 2) + 0.5 * RIDGE * np.sum((x - self.d) ** 2)

    def gx(self, x, y):
        return -self.B.T @ y

    def gy(self, x, y):
        return self.A @ y - self.B @ x - self.b

    def gyy(self, x, y, v):
        return self.A @ v

    def gxy(self, x, y, v):
        return -self.B.T @ v

    def fx(self, x, y):
        return RIDGE * (x - self.d)

    def fy(self, x, y):
        return y - self.c

    def D(self, x, y, u):
        """(Dx, Dy, Du)"""
        return [self.fx(x, y) - self.gxy(x, y, u), self.gy(x, y), self.gyy(x, y, u) - self.fy(x, y)]

    def Phi(self, x, y, tau, Q):
        """FedBiO-Local Eq. (11): Σ_{q=-1}^{Q-1} Π_{j=Q-q}^{Q}, each product multiplied out on its own."""
        series = np.zeros_like(y)
        for q in range(-1, Q):
            product = self.fy(x, y)
            for _ in range(Q - q, Q + 1):
                product = product - tau * self.gyy(x, y, product)
            series += product
        return self.fx(x, y) - tau * self.gxy(x, y, series)


class InValley(Client):
    """A client of the valley, where ∇_y g = -∇_x g = φ'(y - x) + e."""

    def __init__(self, population, m):
        (self.c, self.d), (self.e,) = (
            tuple(np.asarray(a[m]) for a in part.rows) for part in (population.upper, population.lower)
        )

    def gy(self, x, y):
        return 2 * (y - x) + 3 * np.sin(2 * (y - x)) + self.e

    def gx(self, x, y):
        return -self.gy(x, y)

    def gyy(self, x, y, v):
        return (2 + 6 * np.cos(2 * (y - x))) * v

    def gxy(self, x, y, v):
        return -self.gyy(x, y, v)


class Federation(list):
    """The clients and their weights."""

    def __init__(self, clients, weights):
        super().__init__(clients)
        self.weights = weights

    def mean(self, values):
        """Σ_m w_m value_m: both kinds of average, when everyone takes part."""
        return sum(w * v for w, v in zip(self.weights, values, strict=True))


def ball(u, r):
    """P_r"""
    return u * min(1.0, r / np.linalg.norm(u))


# Single-loop methods -------------------------------------------------------------------------------------------------


def simfbo(a, F, x, y, keys):
    """SimFBO's Algorithm 1; ShroFBO's rescaling by ρ = Σ_i w_i |a_i|_1."""
    u = np.zeros_like(y)
    tau = [a.local_steps + m % (a.spread + 1) for m in range(len(F))]
    rho = F.mean(tau)
    for _ in keys:
        sent = []
        for c, steps in zip(F, tau, strict=True):
            xi, yi, ui, q = x, y, u, [0, 0, 0]
            for _ in range(steps):
                d = c.D(xi, yi, ui)
                xi, yi, ui = xi - a.eta_x * d[0], yi - a.eta_y * d[1], ui - a.eta_u * d[2]
                q = [s + v for s, v in zip(q, d, strict=True)]
            sent.append([v / steps for v in q] if a.rescale else q)
        qx, qy, qu = ((rho if a.rescale else 1) * F.mean(part) for part in zip(*sent, strict=True))
        assert np.linalg.norm(u - a.gamma_u * qu) > a.radius
        x, y, u = x - a.gamma_x * qx, y - a.gamma_y * qy, ball(u - a.gamma_u * qu, a.radius)
        yield [x, y, u]


def fedbio(a, F, x, y, keys):
    """FedBiO's Algorithm 2, Eq. (6)."""
    z, t, clipped = [[x, y, np.zeros_like(y)] for _ in F], 0, 0
    for _ in keys:
        while True:
            t += 1
            for m, c in enumerate(F):
                (x, y, u), (nu, omega, p) = z[m], c.D(*z[m])
                clipped += np.linalg.norm(u - a.tau * p) > a.radius
                z[m] = [x - a.eta * nu, y - a.gamma * omega, ball(u - a.tau * p, a.radius)]
            if t % a.local_steps == 0:
                z = [[F.mean(part) for part in zip(*z, strict=True)] for _ in F]
                break
        assert clipped
        yield z[0]


def storm(a, F, z, rounds, D, move, forget, averaged, refreshed=lambda d: None):
    """FedBiOAcc's Algorithm 1, iteration by iteration: line 4, Eq. (8); lines 5-8; Eq. (7); lines 10-14.

    Line 2 leaves the first momenta on the clients; the proof of Lemma C.11 has them equal (D at t_0 is 0), as after any
    averaging. So here `averaged` parts start averaged.
    """

    def average(rows):
        parts = list(zip(*rows, strict=True))
        return [[F.mean(p) if shared else p[m] for p, shared in zip(parts, averaged, strict=True)] for m in range(len(F))]

    z = [list(z) for _ in F]
    d = average([D(c, *zm) for c, zm in zip(F, z, strict=True)])
    refreshed(d[0])
    for t in range(1, rounds * a.local_steps + 1):
        alpha_t = a.delta / (a.offset + t) ** (1 / 3)
        new = [move(zm, dm, alpha_t) for zm, dm in zip(z, d, strict=True)]
        if t % a.local_steps == 0:
            new = average(new)
        for m, c in enumerate(F):
            at_new, at_old = D(c, *new[m]), D(c, *z[m])
            d[m] = [n + (1 - k * alpha_t**2) * (v - o) for n, k, v, o in zip(at_new, forget, d[m], at_old, strict=True)]
        z = new
        if t % a.local_steps == 0:
            d = average(d)
            refreshed(d[0])
            yield z, d, t + 1


def fedbioacc(a, F, x, y, keys):
    """FedBiOAcc's Algorithm 1, Eq. (7)-(8)."""
    clipped = []

    def move(z, d, alpha):
        (x, y, u), (nu, omega, q) = z, d
        clipped.append(np.linalg.norm(u - a.tau * alpha * q) > a.radius)
        return [x - a.eta * alpha * nu, y - a.gamma * alpha * omega, ball(u - a.tau * alpha * q, a.radius)]

    forget = a.c_nu, a.c_omega, a.c_u
    for z, d, t in storm(a, F, (x, y, np.zeros_like(y)), len(keys), Client.D, move, forget, (True, True, True)):
        assert any(clipped)
        yield [*z[0], *d[0], t]


def local_direction(a):
    return lambda c, x, y: [c.Phi(x, y, a.tau, a.neumann_order), c.gy(x, y)]


def fedbio_local(a, F, x, y, keys):
    """FedBiO-Local's Algorithm 3: x is averaged when I divides t, y_m never."""
    xs, ys = [x for _ in F], [y for _ in F]
    for t in range(1, len(keys) * a.local_steps + 1):
        nu = [c.Phi(xm, ym, a.tau, a.neumann_order) for c, xm, ym in zip(F, xs, ys, strict=True)]
        ys = [ym - a.gamma * c.gy(xm, ym) for c, xm, ym in zip(F, xs, ys, strict=True)]
        xs = [xm - a.eta * v for xm, v in zip(xs, nu, strict=True)]
        if t % a.local_steps == 0:
            xs = [F.mean(xs) for _ in F]
            yield [xs[0], np.stack(ys)]


def fedbioacc_local(a, F, x, y, keys):
    """FedBiOAcc-Local's Algorithm 4: x and ν are averaged, y_m and ω_m never."""

    def move(z, d, alpha):
        return [z[0] - a.eta * alpha * d[0], z[1] - a.gamma * alpha * d[1]]

    for z, d, t in storm(a, F, (x, y), len(keys), local_direction(a), move, (a.c_nu, a.c_omega), (True, False)):
        yield [z[0][0], d[0][0], np.stack([zm[1] for zm in z]), np.stack([dm[1] for dm in d]), t]


def local_bsgvr(a, F, x, y, keys):
    """Local-BSGVR; AdaFBiO has A = diag(√a + ρ) and B = b + ρ, refreshed from the averaged momenta."""
    s = SimpleNamespace(a=np.zeros_like(x), b=0.0)

    def refreshed(d):
        s.a = a.memory * s.a + (1 - a.memory) * d[0] ** 2
        s.b = a.memory * s.b + (1 - a.memory) * np.linalg.norm(d[1])

    def move(z, d, alpha):
        A, B = (np.sqrt(s.a) + a.floor, s.b + a.floor) if a.adaptive else (1, 1)
        return [z[0] - a.eta * alpha * d[0] / A, z[1] - a.gamma * alpha * d[1] / B]

    D, forget = local_direction(a), (a.c_nu, a.c_omega)
    for z, d, t in storm(a, F, (x, y), len(keys), D, move, forget, (True, True), refreshed):
        yield [*z[0], *d[0], *((s.a, s.b) if a.adaptive else ()), t]


def s_tfbo(a, F, x, y, keys):
    """S-TFBO's Algorithm 2 with F.mean of the clients' gradients in the gradients' place."""
    u, squares = np.zeros_like(y), np.full(3, a.start**2)
    for _ in keys:
        d = [F.mean(part) for part in zip(*(c.D(x, y, u) for c in F), strict=True)]
        squares = squares + [v @ v for v in d]
        alpha, beta, gamma = np.sqrt(squares)
        y, u, x = y - d[1] / beta, u - d[2] / max(beta, gamma), x - d[0] / (alpha * max(beta, gamma))
        yield [x, y, u, alpha, beta, gamma]


def fedmsa(a, F, x, y, keys):
    """FedMSA as its authors' code has it: everyone's D_m for d, then local steps that carry d_m on; here of everyone."""
    steps = a.alpha, a.beta, a.beta

    def move(z, d):
        return [v - s * w for v, s, w in zip(z, steps, d, strict=True)]

    z, last, d = [x, y, np.zeros_like(y)], None, None
    for t in range(len(keys) + 1):
        sent = []
        for c in F:
            h = c.D(*z)
            if t:
                h = [p + (1 - a.rho) * (v - o) for p, v, o in zip(h, d, c.D(*last), strict=True)]
            sent.append(h)
        d = [F.mean(part) for part in zip(*sent, strict=True)]
        if t:
            yield [*z, *d]
        reached = []
        for c in F:
            cur, dm, p_last = z, d, c.D(*z)
            for _ in range(a.local_steps):
                p = c.D(*cur)
                dm = [now + v - before for now, v, before in zip(p, dm, p_last, strict=True)]
                cur, p_last = move(cur, dm), p
            reached.append(cur)
        last, z = z, [F.mean(part) for part in zip(*reached, strict=True)]


def top_k(v, one_in):
    """The largest entries of v, one in `one_in`; the others are 0."""
    largest = np.argsort(-np.abs(v))[: len(v) // one_in]
    return np.where(np.isin(np.arange(len(v)), largest), v, 0)


def soba(a, F, x, y, keys):
    """CM-SOBA with nothing left out, and EF-SOBA, from their files' own formulas: the paper's listing was not at hand."""
    u, h, feedback = np.zeros_like(y), np.zeros_like(x), isinstance(a, fb.EFSOBA)
    e = [[np.zeros_like(v) for v in (x, y, u)] for _ in F]
    for _ in keys:
        d = [c.D(x, y, u) for c in F]
        C = [[top_k(v - w, a.one_in) for v, w in zip(*both, strict=True)] for both in zip(d, e, strict=True)]
        e = [[v + w for v, w in zip(*both, strict=True)] for both in zip(e, C, strict=True)]
        D = [F.mean(part) for part in zip(*e, strict=True)]
        x, h = x - a.alpha * h, (1 - a.theta) * h + a.theta * D[0]
        assert np.linalg.norm(u - a.gamma * D[2]) > a.radius
        y, u = y - a.beta * D[1], ball(u - a.gamma * D[2], a.radius)
        rows = [len(F) * F.weights[:, None] * np.stack(part) for part in zip(*e, strict=True)]  # M w_m e_m, as CommFedBiO's
        yield [x, y, u, h, *((*D, *rows) if feedback else ())]


def mefbo(a, F, x, y, keys):
    """MeFBO's Algorithm 1, Eq. (8)-(12); steps of Theorem C.1 where decreasing."""
    x, y = np.clip(x, -X_BOX, X_BOX), np.clip(y, -Y_BOX, Y_BOX)
    theta, gamma = y, a.proximal
    for t in range(len(keys)):
        c_t, decreasing = a.penalty * (t + 1) ** a.growth, a.schedule == "decreasing"
        eta, lam = ((t + 1) ** -0.25, (t + 1) ** -a.decay) if decreasing else (1, 1)
        sent = []
        for c in F:
            xi, yi, ti, h = x, y, theta, []
            for _ in range(a.local_steps):
                h_theta = c.gy(xi, ti) + (ti - yi) / gamma
                h_y = c.fy(xi, yi) / c_t + c.gy(xi, yi) - (yi - ti) / gamma
                h_x = c.fx(xi, yi) / c_t + c.gx(xi, yi) - c.gx(xi, ti)
                h.append([h_x, h_y, h_theta])
                xi, yi, ti = xi - eta * a.eta_x * h_x, yi - eta * a.eta_y * h_y, ti - eta * a.eta_theta * h_theta
            sent.append([sum(part) / a.local_steps for part in zip(*h, strict=True)])
        hx, hy, htheta = (F.mean(part) for part in zip(*sent, strict=True))
        x, y, theta = x - lam * a.lambda_x * hx, y - lam * a.lambda_y * hy, theta - lam * a.lambda_theta * htheta
        assert all(0 < np.sum(np.abs(v) > b) < len(v) for v, b in ((x, X_BOX), (y, Y_BOX), (theta, Y_BOX)))
        x, y, theta = np.clip(x, -X_BOX, X_BOX), np.clip(y, -Y_BOX, Y_BOX), np.clip(theta, -Y_BOX, Y_BOX)
        yield [x, y, theta, t + 1]


def square(v):
    """|v|²"""
    return np.sum(v**2)


class Pace:
    """The pace p, with β for its averages and its bound: its module's docstring."""

    def __init__(self, beta, x, fastest):
        self.fastest = fastest
        self.beta, self.p, self.averages, self.last_loss, self.least, self.best_x, self.since = (
            beta,
            1.0,
            None,
            None,
            np.inf,
            x,
            0,
        )

    def average(self, old, new):
        """Of lists, from the first on."""
        return new if old is None else [self.beta * o + (1 - self.beta) * n for o, n in zip(old, new, strict=True)]

    def after(self, x, d, along, loss):
        """A round at x, which has found d and the loss, and moves x along `along`."""
        jump = (loss - self.last_loss) ** 2 if self.since else 0.0
        self.averages = late, f, jump = self.average(self.averages, [square(d), loss, jump])
        if self.since == 0 or f <= self.least:
            self.least, self.best_x = f, x
        risen = f > self.least + np.sqrt(jump) and along @ (x - self.best_x) > 0 and self.since > 25
        if risen:
            self.p /= 2
        elif 2 * square(along) > late:
            self.p = min(self.fastest, 1.02 * self.p)
        elif self.p > 1:
            self.p = max(1, self.p / 1.02)
        self.since, self.last_loss = 0 if risen else self.since + 1, loss

    def leaves(self):
        return [self.p, *self.averages, self.last_loss, self.least, self.best_x, self.since]


def fedpace(a, F, x, y, keys, box=np.inf, few=False):
    """FedPace's docstring, with curvatures by eigenvalues and ∂_x D h by a complex step.

    A client's rows of each kind are as many and alike, and all minibatches the same. A box, if any, confines x and y. `few`
    says whether f has twenty rows for each entry of x.
    """

    def clip(v):
        return np.clip(v, -box, box)

    x, y, u = clip(x), clip(y), np.zeros_like(y)

    def curvatures(product):
        return np.linalg.eigvalsh(np.stack([product(e) for e in np.eye(len(y))]))

    spectra = [curvatures(lambda e, c=c: c.gyy(x, y, e)) for c in F]
    f_spectra = [curvatures(lambda e, c=c: np.imag(c.fy(x, y + 1e-30j * e)) / 1e-30) for c in F]
    largest, bends = ([np.abs(values).max() for values in some] for some in (spectra, f_spectra))
    L = F.mean(largest)
    convex = box == np.inf and F.mean([values.min() for values in spectra]) > -1e-4 * L
    few = few and not convex
    delta_0 = 1 / F.mean([f / g for f, g in zip(bends, largest, strict=True)])
    delta = 0.0 if convex else delta_0
    fixed = np.sin(np.arange(1, len(y) + 1))
    m, reported, averages, L_x, D_x = [0, 0, 0], [x, y], None, 0.0, 0.0
    pace = Pace(a.beta, x, max(1, (1 - np.sqrt(a.beta)) / a.phi))

    for t in range(1, len(keys) + 1):
        secant = delta > 1e-3 * delta_0

        def D(c, x):
            end = y + delta * u
            G = (c.gx(x, end) - c.gx(x, y)) / delta if secant else c.gxy(x, y, u)
            H = (c.gy(x, end) - c.gy(x, y)) / delta if secant else c.gyy(x, y, u)
            return [c.fx(x, y) - G, c.gy(x, y) + delta * c.fy(x, y), H - c.fy(x, y)]

        sent = []
        for c in F:
            d = D(c, x)
            h = d[0] / np.linalg.norm(d[0])
            _, *turned = turned_x, *_ = [np.imag(part) / 1e-30 for part in D(c, x + 1e-30j * h)]
            v = c.gyy(x, y, d[1] / np.linalg.norm(d[1]) + fixed / np.linalg.norm(fixed))
            lengths = c.gyy(x, y, v), v, turned_x, c.fy(x, y), c.fx(x, y), d[0] - c.fx(x, y)
            sent.append([*d, *map(square, lengths), c.fy(x, y), *turned, c.f(x, y)])
        *d, bent, v, turned_x, fy, fx, G, mean_fy, turned_y, turned_u, loss = (F.mean(part) for part in zip(*sent, strict=True))

        agreed_y = m[1] / (1 - a.beta ** (t - 1)) if t > 1 else 0
        relative = square(turned_y) / (square(d[1]) + delta_0**2 * square(mean_fy)) + square(turned_u) / square(mean_fy)
        now = [np.sqrt(relative + few * turned_x / (G + fx)), G / (G + fx), square(d[1] - agreed_y)]
        averages = r, s, noise = pace.average(averages, now)
        m = [a.beta * old + (1 - a.beta) * new for old, new in zip(m, d, strict=True)]
        along = [part / (1 - a.beta**t) for part in m]
        p = pace.p
        pace.after(x, d[0], along[0], loss)
        L, L_x = max(0.98 * L, np.sqrt(bent / v)), max(0.98 * L_x, np.sqrt(turned_x))
        D_x = max((max(0.95, 1 - 3 / t) if few else 0.95) * D_x, square(d[0]), pace.averages[0])
        step_y = min(1, t / 20) * a.c / L
        step_x = min(1, (t - 1) / 50) * p * min(a.c_x / L_x, a.phi / (s**4 * r * np.sqrt(D_x)) if s else np.inf)

        x, y, u = clip(x - step_x * along[0]), clip(y - step_y * along[1]), u - step_y * along[2]
        if secant:
            u = (clip(y + delta * u) - y) / delta
        if not convex:
            most = delta_0 * (max((1 + (t - 1) / 50) ** -2, 2e-3) if few else 1)
            delta = min(most, max(10 * np.sqrt(noise / fy), 0 if box == np.inf else 2e-3 * delta_0))
        reported = [old + 9 / (t + 8) * (new - old) for old, new in zip(reported, (x, y), strict=True)]
        measured = [int(convex), int(few), delta_0, delta, L, L_x, D_x, *averages]
        yield [*reported, x, y, u, *m, t, *measured, *pace.leaves()]


def fedpace_local(a, F, x, y, keys):
    """FedPace-Local's docstring with exact inverses, which solve a quadratic lower level in one step."""
    m, L, apart, pace = 0, 0.0, 0, Pace(a.beta, x, 10)
    for t in range(1, len(keys) + 1):
        ys, d, turned, loss = [], [], [], []
        for c in F:
            y = np.linalg.solve(c.A, c.B @ x + c.b)
            d.append(c.fx(x, y) - c.gxy(x, y, np.linalg.solve(c.A, c.fy(x, y))))
            J, v = np.linalg.solve(c.A, c.B), d[-1] / np.linalg.norm(d[-1])
            turned.append(square(RIDGE * v + J.T @ J @ v))
            loss.append(c.f(x, y))
            ys.append(y)
        m = a.beta * m + (1 - a.beta) * F.mean(d)
        along = m / (1 - a.beta**t)
        L = max(0.98 * L, np.sqrt(F.mean(turned)))
        step = pace.p * a.c * min(1, t / 10) / L / (1 + apart / 20)
        pace.after(x, F.mean(d), along, F.mean(loss))
        apart += 2 * square(along) <= pace.averages[0]
        x = x - step * along
        yield [x, m, t, L, apart, *pace.leaves(), np.stack(ys)]


def fedavg(a, F, x, y, keys):
    """Local SGD on y; x stays."""
    for _ in keys:
        y = one_round_lower(F, x, y, a.gamma, a.local_steps, "fedavg")
        yield [x, y]


# Double-loop methods -------------------------------------------------------------------------------------------------


def one_round_lower(F, x, y, beta, tau, solver, q=None):
    """FedMBO's lines 5-11 (sgd), local SGD (fedavg), FBO-AggITD's Algorithm 2 = FedNest's FedInn (fedsvrg)."""
    q = F.mean([c.gy(x, y) for c in F]) if q is None else q
    if solver == "sgd":
        return y - beta * q
    last = []
    for c in F:
        yi = y
        for _ in range(tau):
            yi = yi - beta * (c.gy(x, yi) - (c.gy(x, y) - q if solver == "fedsvrg" else 0))
        last.append(yi)
    return F.mean(last)


def lower(a, F, x, y):
    """T rounds."""
    for _ in range(a.lower_rounds):
        y = one_round_lower(F, x, y, a.beta, a.local_steps, a.lower_solver)
    return y


def one_round_upper(F, x, y, h, alpha, tau):
    """FBO-AggITD's Algorithm 4, FedNest's FedOut."""
    last = []
    for c in F:
        xi = x
        for _ in range(tau):
            xi = xi - alpha * (h - c.fx(x, y) + c.fx(xi, y))
        last.append(xi)
    return F.mean(last)


def ihgp(a, F, x, y, N_):
    """FedMBO's paper, below Eq. (5): FedNest's p_{N'} and the mean of the h_i."""
    p = a.neumann_terms / a.smoothness * F.mean([c.fy(x, y) for c in F])
    for _ in range(N_):
        p = F.mean([p - c.gyy(x, y, p) / a.smoothness for c in F])
    return F.mean([c.fx(x, y) - c.gxy(x, y, p) for c in F])


def phe(a, F, x, y, N_i):
    """FedMBO's Algorithm 2, line 4 as in Eq. (6), for one chain at one client."""
    (c,) = F
    d, p = c.fx(x, y), a.neumann_terms / a.smoothness * c.fy(x, y)
    for _ in range(N_i):
        p = p - c.gyy(x, y, p) / a.smoothness
    return d - c.gxy(x, y, p)


def fedmbo(a, F, x, y, keys):
    """FedMBO's Algorithm 1; FedNest with IHGP and FedOut."""
    for key in keys:
        (length,) = a.lengths(key, 1)
        y = lower(a, F, x, y)
        h = (phe if a.estimator == "phe" else ihgp)(a, F, x, y, int(length))
        x = one_round_upper(F, x, y, h, a.alpha, a.local_steps) if a.local_upper else x - a.alpha * h
        yield [x, y]


def fbo_aggitd(a, F, x, y, keys):
    """FBO-AggITD's Algorithms 1-4, with λ in line 6 and the last z in line 15."""
    N, seen = a.lower_rounds, set()
    for key in keys:
        Q = int(jax.random.randint(key, (), 0, N + 1))
        seen.add(Q)
        for t in range(N + 1):
            q = F.mean([c.gy(x, y) for c in F])
            if t == Q:
                z = F.mean([c.fy(x, y) for c in F])
            if t > Q:
                z = F.mean([z - a.neumann_step * c.gyy(x, y, z) for c in F])
            if t < N:
                y = one_round_lower(F, x, y, a.beta, a.local_steps, a.lower_solver, q)
        p = a.neumann_step * (N + 1) * z
        h = F.mean([c.fx(x, y) - c.gxy(x, y, p) for c in F])
        x = one_round_upper(F, x, y, h, a.alpha, a.local_steps)
        yield [x, y]
    assert {0, N} < seen, seen


def lfednest(a, F, x, y, keys):
    """Light-FedNest: τ local steps on x along Φ_m(x_m, y), with N terms and steps 1/ℓ in the Neumann series."""
    for _ in keys:
        y, last = lower(a, F, x, y), []
        for c in F:
            xi = x
            for _ in range(a.local_steps):
                xi = xi - a.alpha * c.Phi(xi, y, 1 / a.smoothness, a.neumann_terms - 1)
            last.append(xi)
        x = F.mean(last)
        yield [x, y]


def commfedbio(a, F, x, y, keys):
    """CommFedBiO: rounds on H u = ∇_y f with the top-k entries of e_m + gradient; the rest is fed back."""
    u, e = np.zeros_like(y), [np.zeros_like(y) for _ in F]
    for _ in keys:
        y = lower(a, F, x, y)
        for _ in range(a.system_rounds):
            wanted = [em + c.gyy(x, y, u) - c.fy(x, y) for c, em in zip(F, e, strict=True)]
            sent = [top_k(v, a.one_in) for v in wanted]
            e = [v - C for v, C in zip(wanted, sent, strict=True)]
            u = u - a.tau * F.mean(sent)
        x = x - a.alpha * F.mean([c.fx(x, y) - c.gxy(x, y, u) for c in F])
        yield [x, y, u, len(F) * F.weights[:, None] * np.stack(e)]  # the package weighs before it compresses: M w_m e_m


def d_tfbo(a, F, x, y, keys):
    """D-TFBO's Algorithm 1 with F.mean of the clients' gradients in the gradients' place, P steps on y and Q on u."""
    u, alpha2, beta2, gamma2 = np.zeros_like(y), a.start**2, a.start**2, a.start**2
    for _ in keys:
        for _ in range(a.lower_rounds):
            q = F.mean([c.gy(x, y) for c in F])
            beta2 += q @ q
            y = y - q / np.sqrt(beta2)
        for _ in range(a.system_rounds):
            r = F.mean([c.gyy(x, y, u) - c.fy(x, y) for c in F])
            gamma2 += r @ r
            u = u - r / np.sqrt(gamma2)
        h = F.mean([c.fx(x, y) - c.gxy(x, y, u) for c in F])
        alpha2 += h @ h
        x = x - h / np.sqrt(alpha2)
        yield [x, y, u, *np.sqrt([alpha2, beta2, gamma2])]


# The comparison ------------------------------------------------------------------------------------------------------

SIMFBO = dict(local_steps=3, eta_x=0.05, eta_y=0.3, eta_u=0.4, gamma_x=0.07, gamma_y=0.25, gamma_u=0.35, radius=0.5)
LOCAL = dict(local_steps=3, eta=0.1, gamma=0.3, tau=0.4, neumann_order=3)
STORM = LOCAL | dict(eta=0.2, gamma=0.7, delta=0.9, offset=2.0, c_nu=0.5, c_omega=1.2)
FEDBIOACC = dict(local_steps=3, eta=0.2, gamma=0.7, tau=0.6, delta=0.9, offset=2.0, c_nu=0.5, c_omega=1.2, c_u=0.8, radius=0.5)
DOUBLE = dict(alpha=0.2, beta=0.3, lower_rounds=3, local_steps=2)
NEUMANN = DOUBLE | dict(smoothness=1.5, neumann_terms=5)
MEFBO = dict(
    **dict(local_steps=3, eta_x=0.5, eta_y=0.3, eta_theta=0.2, lambda_x=0.7, lambda_y=0.4, lambda_theta=0.5),
    **dict(penalty=1.5, growth=0.2, proximal=0.6, decay=0.55),
)
SOBA = dict(alpha=0.2, beta=0.3, gamma=0.4, theta=0.6, radius=0.2)
COMM = DOUBLE | dict(tau=0.3, system_rounds=3, lower_solver="fedavg")

CASES = [
    ("simfbo", SIMFBO, simfbo),
    ("simfbo", SIMFBO | dict(spread=2), simfbo),
    ("shrofbo", SIMFBO | dict(spread=2), simfbo),
    ("fedbio", dict(local_steps=3, eta=0.1, gamma=0.3, tau=0.4, radius=0.5), fedbio),
    ("fedbioacc", FEDBIOACC, fedbioacc),
    ("fedbio-local", LOCAL, fedbio_local),
    ("fedbio-local", LOCAL | dict(neumann_order=0), fedbio_local),
    ("fedbioacc-local", STORM, fedbioacc_local),
    ("distbio", LOCAL | dict(local_steps=1), fedbio_local),
    ("distbioacc", STORM | dict(local_steps=1), fedbioacc_local),
    ("local-bsgvr", STORM, local_bsgvr),
    ("adafbio", STORM | dict(memory=0.7, floor=0.3), local_bsgvr),
    ("fednest", NEUMANN, fedmbo),
    *(("fedmbo", NEUMANN | dict(estimator="ihgp", lower_solver=solver), fedmbo) for solver in ("sgd", "fedavg", "fedsvrg")),
    ("fedmbo", NEUMANN | dict(estimator="phe"), fedmbo),
    *(("fbo-aggitd", DOUBLE | dict(neumann_step=0.4, lower_solver=solver), fbo_aggitd) for solver in ("fedsvrg", "fedavg")),
    *(("lfednest", NEUMANN | dict(lower_solver=solver), lfednest) for solver in ("sgd", "fedavg", "fedsvrg")),
    *(("commfedbio", COMM | dict(one_in=one_in), commfedbio) for one_in in (1, 4)),
    *(("mefbo", MEFBO | dict(schedule=schedule), mefbo) for schedule in ("fixed", "decreasing")),
    ("s-tfbo", dict(start=0.5), s_tfbo),
    ("d-tfbo", dict(start=0.5, lower_rounds=3, system_rounds=2), d_tfbo),
    *(("fedmsa", dict(alpha=0.1, beta=0.3, rho=0.4, local_steps=steps), fedmsa) for steps in (1, 3)),
    ("cm-soba", SOBA | dict(one_in=1), soba),  # what a client leaves out is random: see test_estimators.py
    *(("ef-soba", SOBA | dict(one_in=one_in), soba) for one_in in (1, 4)),
    ("fedavg", dict(local_steps=3, gamma=0.3), fedavg),
    ("fedpace-local", dict(), fedpace_local),
    ("fedpace", dict(minibatches=2), fedpace),
    ("fedpace", dict(minibatches=2, beta=0.7, c=3.0, c_x=1.0, phi=0.5), fedpace),
]
STEPS = {fbo_aggitd: 10, fedmbo: 10, fedpace: 80, fedpace_local: 80}


def start():
    rng = np.random.default_rng(7)
    return rng.standard_normal(TASK.x_dimension), rng.standard_normal(TASK.y_dimension)


def name_of(case):
    told_apart = ("estimator", "lower_solver", "schedule", "one_in", "spread", "neumann_order")
    return "-".join([case[0], *(str(case[1][k]) for k in told_apart if k in case[1])])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_algorithm_follows_its_pseudocode(case):
    name, settings, reference = case
    algorithm = ALGORITHMS[name].configure(name, settings)
    alone = settings.get("estimator") == "phe"  # all chains of PHE visit the one client
    task, weights = (dataclasses.replace(TASK, clients=1), np.ones(1)) if alone else (TASK, WEIGHTS)
    population = weighted(task.build().population, weights)
    if name == "mefbo":
        boxes = Sets(Box(-X_BOX, X_BOX), Box(-Y_BOX, Y_BOX))
        population = dataclasses.replace(population, problem=dataclasses.replace(population.problem, sets=boxes))
    keys = jax.random.split(jax.random.key(3), STEPS.get(reference, 4))
    clients = [Client(task.coefficients(), m) for m in range(task.clients)]
    follows(algorithm, population, reference, Federation(clients, weights), start(), keys)


def follows(algorithm, population, reference, federation, start, keys):
    """All of the state is the reference's after every step; the states are returned."""
    simulator, states = SimulatedEngine(population, Everyone()), []
    state, *_ = jax.jit(simulator.init)(algorithm, *map(jnp.asarray, start), jax.random.key(2))
    step = jax.jit(simulator.step)
    wanted = list(reference(algorithm, federation, *start, [jax.random.split(key)[0] for key in keys]))
    assert len(wanted) == len(keys)
    for k, (key, leaves) in enumerate(zip(keys, wanted, strict=True)):
        state, *_ = step(algorithm, state, key)
        states.append(state)
        given = jax.tree.leaves(state)
        assert len(given) == len(leaves)
        for j, (got, want) in enumerate(zip(given, leaves, strict=True)):
            error = np.linalg.norm(np.asarray(got) - want) / max(np.linalg.norm(want), 1e-6)
            assert error < 1e-9, f"step {k}, leaf {j}: relative error {error:.2g}"
    return states


@pytest.mark.parametrize(("box", "rows", "steps"), [(np.inf, 1, 38), (0.3, 1, 55), (np.inf, 30, 38), (0.3, 30, 55)])
def test_fedpace_follows_its_pseudocode_where_the_lower_level_is_not_convex(box, rows, steps):
    """With secants, the shorter the less noise; then rounding grows as they shrink.

    With 30 rows each, four clients have more than twenty for each of x's five entries.
    """
    task = Valley(clients=4).build()
    population = weighted(task.population, WEIGHTS)
    federation = Federation([InValley(population, m) for m in range(4)], WEIGHTS)
    upper, lower = (
        Shards.stack([jax.tree.map(lambda a: np.repeat(np.asarray(a), rows, 0), shards.at(m, np.arange(1))) for m in range(4)])
        for shards in (population.upper, population.lower)
    )
    population = dataclasses.replace(population, upper=upper, lower=lower)
    if box < np.inf:
        sets = Sets(Box(-box, box), Box(-box, box))
        population = dataclasses.replace(population, problem=dataclasses.replace(population.problem, sets=sets))
    algorithm, reference = fb.FedPace(minibatches=2, beta=0.5, c=2.0), partial(fedpace, box=box, few=rows == 30)
    start, keys = (np.asarray(task.x), np.asarray(task.y)), jax.random.split(jax.random.key(3), steps)
    states = follows(algorithm, population, reference, federation, start, keys)
    shares = np.array([float(state.delta / state.delta_0) for state in states])
    assert states[0].few == (rows == 30)
    assert shares[0] == 1 and 1e-3 < shares.min() < 0.3
    assert box == np.inf or np.abs(states[-1].z.x).max() == box


# Minibatches ---------------------------------------------------------------------------------------------------------

NOISY = dataclasses.replace(TASK, noise=0.5, batch_size=2)


@pytest.fixture
def uses(monkeypatch):
    """The derivatives that were taken: (name, index k of the minibatch, its rows of f, its rows of g)."""
    drawn, uses, batch, five_batches = [], [], fb.Client.batch, fb.Client.five_batches

    def one(self, k=0, times=1):
        out = batch(self, k, times)
        drawn.append((out, (int(k), 0)))
        return out

    def five(self, k=0, times=1, shared=False):
        out = five_batches(self, k, times, shared)
        drawn.extend((batch, (int(k), i)) for i, batch in enumerate(out))
        return out

    def derivative(name):
        taken = getattr(Problem, name)

        def of(self, x, y, batch, *v):
            if not isinstance(x, jax.core.Tracer):  # the ∇_y g inside a second derivative is no use of its own
                index = next(index for known, index in drawn if known is batch)
                uses.append((name, index, len(batch.upper.c), len(batch.lower.b)))
            return taken(self, x, y, batch, *v)

        return of

    monkeypatch.setattr(fb.Client, "batch", one)
    monkeypatch.setattr(fb.Client, "five_batches", five)
    for name in ("fx", "fy", "gx", "gy", "gyy", "gxy"):
        monkeypatch.setattr(Problem, name, derivative(name))
    with jax.disable_jit():
        yield uses


def a_client():
    return NOISY.build().population.client(1, jax.random.key(5))


def test_first_momentum_has_a_batch_local_steps_as_large(uses):
    algorithm = ALGORITHMS["fedbioacc"].configure("fedbioacc", FEDBIOACC)
    x, y = map(jnp.asarray, start())
    z = Point(x, y, jnp.zeros_like(y))
    d = algorithm.first_momentum(a_client(), z)
    assert {use[2:] for use in uses} == {(3 * 2, 3 * 2)}
    assert sorted((name, i) for name, (_, i), *_ in uses) == [("fx", 3), ("fy", 4), ("gxy", 1), ("gy", 0), ("gyy", 2)]
    uses.clear()
    algorithm.local_iterates(a_client(), z, d, jnp.int32(1))
    assert {use[2:] for use in uses} == {(2, 2)}
    for k in range(2):  # STORM: the same five minibatches at the new and the old point, others in every iteration
        indices = [(name, i) for name, (at, i), *_ in uses if at == k]
        assert sorted(indices) == sorted(2 * [("fx", 3), ("fy", 4), ("gxy", 1), ("gy", 0), ("gyy", 2)])
    assert {at for _, (at, _), *_ in uses} == {0, 1}


def test_a_local_step_of_fedbio_local_has_a_minibatch_for_each_derivative(uses):
    algorithm = ALGORITHMS["fedbio-local"].configure("fedbio-local", LOCAL)
    algorithm.local_point(a_client(), *map(jnp.asarray, start()))
    names = sorted(name for name, *_ in uses)
    assert names == sorted(3 * (["gy", "fy", "fx", "gxy"] + 3 * ["gyy"]))
    # Eq. (11) has one ξ_f for both derivatives of f and one ξ_g; f and g never share rows, so fx and gxy may share an index
    indices = [index for name, index, *_ in uses if name != "fx"]
    assert len(set(indices)) == len(indices)
    of_f = [index for name, index, *_ in uses if name in ("fx", "fy")]
    assert len(set(of_f)) == len(of_f)


def test_phe_starts_with_independent_minibatches_for_both_derivatives_of_f(uses):
    algorithm = ALGORITHMS["fedmbo"].configure("fedmbo", NEUMANN)
    algorithm.chain_start(a_client(), *map(jnp.asarray, start()))
    (first, k, *_), (second, other, *_) = uses
    assert {first, second} == {"fx", "fy"} and k != other
