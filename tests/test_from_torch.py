"""Converted PyTorch modules against PyTorch: outputs, gradients and Hessian-vector products in double precision."""

import copy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import deployed
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbilevel as fb
from fedbilevel.core.participation import Everyone
from fedbilevel.core.population import Population
from fedbilevel.core.problem import from_trees
from fedbilevel.core.sets import UNCONSTRAINED
from fedbilevel.engines.simulated import SimulatedEngine
from fedbilevel.tasks.models import aten

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Calls(nn.Module):
    """A linear layer, then a function of its outputs and the inputs."""

    def __init__(self, function, inputs=6, outputs=6):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x), x)


class Attention(nn.Module):
    def __init__(self, mask=None, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask)


class Tied(nn.Module):
    """A model of sequences whose last layer has the weights of the first."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=2)
        self.last = nn.Linear(6, 9)
        self.last.weight = self.embedding.weight

    def forward(self, tokens):
        return {"scores": self.last(self.embedding(tokens).tanh()), "nothing": None}


class TwoInputs(nn.Module):
    """Another input, buffers, a frozen parameter and one without gradient in part."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.left.bias.requires_grad_(False)
        self.register_buffer("scale", torch.arange(1.0, 5))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, a, b):
        hidden = self.left(a) * self.scale + self.shift
        with torch.no_grad():
            size = hidden.norm(dim=1, keepdim=True)
        return self.right(b) * hidden / size, hidden.detach() * hidden


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.block = nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1, bias=False))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        x = F.max_pool2d(x + self.block(x), 2)
        return self.last(x.mean((2, 3)))


def after_convolution(*layers, dimensions=2):
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    return nn.Sequential(convolution(2, 4, 1), *layers)


VECTOR, SEQUENCE, IMAGE = (6,), (2, 9), (2, 8, 7)
ACTIVATIONS = [
    *(nn.ReLU(), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.SELU(), nn.CELU(2.0), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish()),
    *(
        nn.Tanh(),
        nn.Sigmoid(),
        nn.LogSigmoid(),
        nn.Softplus(),
        nn.Softplus(2.0, 1.0),
        nn.Softsign(),
        nn.Tanhshrink(),
        nn.PReLU(),
    ),
    *(nn.ReLU6(), nn.Hardtanh(-0.3, 0.4), nn.Hardswish(), nn.Softmax(1), nn.LogSoftmax(-1), nn.GLU()),
]
FUNCTIONS = {
    "arithmetic": lambda y, x: (2 - y) * x / (1 + y**2) - y.abs().sqrt() + 3 / (1 + x.exp()),
    "powers": lambda y, x: y.pow(3) + y.square() + (y**2 + 1) ** -0.5 + 2**y + torch.rsqrt(y**2 + 0.1),
    "functions": lambda y, x: sum(
        f(y) for f in (torch.sin, torch.cos, torch.tan, torch.atan, torch.sinh, torch.cosh, torch.erf)
    ),
    "logarithms": lambda y, x: (y**2 + 1).log2() + (y**2 + 2).log10() + (y**2).log1p() + torch.exp2(y) + y.exp().expm1(),
    "rounded": lambda y, x: y * (x.floor() + x.ceil() + x.round() + x.trunc() + x.sign() + x % 0.7 + x.fmod(0.4) + x // 0.3),
    "truth": lambda y, x: torch.where((x > 0) & (x <= 1) | ~((x < -1) | x.isnan()), y, -y) * truths(y, x)[:, None],
    "reductions": lambda y, x: torch.stack(
        [
            y.mean(1),
            y.sum(1),
            y.var(1),
            y.std(1),
            y.amax(1),
            y.amin(1),
            y.prod(1),
            y.cumsum(1)[:, 2],
            y.logsumexp(1),
            y.norm(dim=1),
        ]
    ),
    "extremes": lambda y, x: torch.stack(
        [y.max(1).values, y.min(dim=1)[0], torch.maximum(y, x)[:, 0], torch.minimum(y, x)[:, 1]]
    ),
    "bounds": lambda y, x: y.clamp(-0.2, 0.3) + y.clamp_min(0.1) * x.clip(max=0.5),
    "shapes": lambda y, x: y.view(-1, 2, 3).permute(2, 0, 1).transpose(0, 1).reshape(len(y), -1).unsqueeze(1).squeeze(1),
    "parts": lambda y, x: torch.cat([*y.chunk(2, 1), *x.split([1, 5], 1), y[:, 1:4:2], y[:, -1:], y[:, None, 2]], 1),
    "stacks": lambda y, x: (
        torch.stack([y, x], 1).flatten(1).unflatten(1, (3, 4)).repeat(1, 2, 1).flip(2).roll(1, 2).unbind(1)[1]
    ),
    "products": lambda y, x: (
        torch.einsum("ni,nj->nij", y, x) @ (y[:, :, None] * x[:, None]) + torch.bmm(y[:, None], x[..., None])
    ),
    "matrices": lambda y, x: torch.addmm(x.sum(1, True), y, y.T @ x, beta=0.3, alpha=2) + torch.mm(x, y.T) @ y,
    "padding": lambda y, x: F.pad(y, (1, 2), value=0.5) + F.pad(y[:, None], (2, 1), mode="replicate")[:, 0],
    "masks": lambda y, x: torch.where(x > 0, y, -y).masked_fill(x > 1, 0.3) * torch.tril(torch.ones_like(y @ y.T))[:, :1],
    "indices": lambda y, x: y[:, [0, 2, 2]] + y.gather(1, x.argmax(1)[:, None]) + y.index_select(1, torch.tensor([5, 4, 3])),
    "assignment": lambda y, x: assigned(y),
    "types": lambda y, x: y * (x > 0).to(y.dtype) + x.long().double() * y + torch.arange(6, device=y.device) * y,
    "normalised": lambda y, x: F.normalize(y, dim=1) + F.cosine_similarity(y, x, dim=1)[:, None] + F.rms_norm(y, (6,)),
    "loss": lambda y, x: F.cross_entropy(y, x.argmax(1), reduction="none") + F.mse_loss(y, x) + F.huber_loss(y, x),
}


def truths(y, x):
    wide = torch.logical_and(x.any(1), torch.logical_or(x.isfinite().all(1), torch.logical_not(x[:, 0] == x[:, 1])))
    return wide.to(y.dtype) + x.argmin(1) + (x[:, 0] >= 0) + (x[:, 1] != 0)


def assigned(y):
    y = y.clone()
    y[:, 0] = 1.5
    y[:, 2:4] *= 2
    y[:, [4, 5]] = y[:, [5, 0]] * 3
    return y


CASES = {
    "linear": (lambda: nn.Linear(6, 4), VECTOR),
    "linear without bias": (lambda: nn.Linear(6, 4, bias=False), (3, *VECTOR)),
    "bare": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 2, 5), nn.ReLU(), nn.Linear(5, 2)), IMAGE),
    "one dimension": (lambda: nn.Conv1d(2, 4, 3, 2, 1), SEQUENCE),
    "two dimensions": (lambda: nn.Conv2d(2, 4, (3, 2), (2, 1), (1, 0), (1, 2), groups=2), IMAGE),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 3, 3)),
    "same padding": (lambda: nn.Conv2d(2, 4, 3, padding="same", padding_mode="replicate"), IMAGE),
    "depthwise": (lambda: nn.Conv2d(2, 4, 3, groups=2, bias=False), IMAGE),
    "batch norm of rows": (lambda: after_convolution(nn.BatchNorm2d(4, track_running_stats=False)), IMAGE),
    "batch norm of constants": (lambda: statistics(after_convolution(nn.BatchNorm2d(4))).eval(), IMAGE),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), (3, *VECTOR)),
    "layer norm of maps": (lambda: after_convolution(nn.LayerNorm([4, 8, 7], elementwise_affine=False)), IMAGE),
    "group norm": (lambda: after_convolution(nn.GroupNorm(2, 4)), IMAGE),
    "instance norm": (lambda: after_convolution(nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "max pool": (lambda: after_convolution(nn.MaxPool2d(3, 2, 1, 2)), IMAGE),
    "max pool of a sequence": (lambda: after_convolution(nn.MaxPool1d(2), dimensions=1), SEQUENCE),
    "mean pool": (lambda: after_convolution(nn.AvgPool2d((3, 2), 2, 1, count_include_pad=False)), IMAGE),
    "mean pool of a sequence": (lambda: after_convolution(nn.AvgPool1d(3, 2, 1), dimensions=1), SEQUENCE),
    "sums by pooling": (lambda: after_convolution(nn.AvgPool2d(2, divisor_override=1)), IMAGE),
    "adaptive mean": (lambda: after_convolution(nn.AdaptiveAvgPool2d((3, None))), IMAGE),
    "adaptive mean of a sequence": (lambda: after_convolution(nn.AdaptiveAvgPool1d(4), dimensions=1), SEQUENCE),
    "maps of volumes": (lambda: after_convolution(nn.MaxPool3d(2, 1), nn.AvgPool3d(2, 1), dimensions=3), (2, 3, 4, 3)),
    "adaptive mean of volumes": (lambda: after_convolution(nn.AdaptiveAvgPool3d(2), dimensions=3), (2, 3, 4, 3)),
    "global mean": (lambda: after_convolution(nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE),
    "dropout that drops nothing": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0)), VECTOR),
    "dropout in evaluation": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).eval(), VECTOR),
    "attention": (Attention, (4, 6)),
    "attention with a mask": (lambda: Attention(torch.ones(4, 4).triu(1).bool()), (4, 6)),
    "attention in evaluation": (lambda: Attention(dropout=0.3).eval(), (4, 6)),
    "causal attention": (lambda: Calls(lambda y, x: F.scaled_dot_product_attention(y, x, y * x, is_causal=True)), (4, 6)),
    "an added mask": (lambda: Calls(lambda y, x: F.scaled_dot_product_attention(y, y, x, torch.ones(4, 4), scale=0.3)), (4, 6)),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0, activation="gelu"), (4, 6)),
    "recurrent": (lambda: nn.GRU(6, 3, batch_first=True), (3, 6)),
    "residual": (Residual, IMAGE),
    "tied": (Tied, None),
    "two inputs": (TwoInputs, None),
    **{f"{layer}": (lambda layer=layer: nn.Sequential(nn.Linear(6, 6), copy.deepcopy(layer)), VECTOR) for layer in ACTIVATIONS},
    **{name: (lambda function=function: Calls(function), VECTOR) for name, function in FUNCTIONS.items()},
}


def statistics(module):
    """The module with running statistics of some rows."""
    module(torch.randn(20, *IMAGE))
    return module


def made(case, rows=3):
    """A case's module and inputs of so many rows."""
    torch.manual_seed(0)
    make, shape = CASES[case]
    rng = np.random.default_rng(rows)
    inputs = [rng.standard_normal((rows, *shape))] if shape else []
    if case == "tied":
        inputs = [rng.integers(0, 9, (rows, 5))]
    if case == "two inputs":
        inputs = [rng.standard_normal((rows, 3)), rng.standard_normal((rows, 2))]
    return make().double(), inputs


def derivatives(function, parameters):
    """PyTorch's outputs, gradient and Hessian-vector product of half the sum of squared outputs, along some vector."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others have no second derivatives
        outputs = jax.tree.leaves(function())
        loss = sum((o**2).sum() / 2 for o in outputs)
        gradient = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        slope = sum((g * p.detach().cos()).sum() for g, p in zip(gradient, parameters.values(), strict=True))
        product = torch.autograd.grad(slope, list(parameters.values()), allow_unused=True)
    product = [torch.zeros_like(p) if h is None else h for h, p in zip(product, parameters.values(), strict=True)]
    named = [{n: a.detach().numpy() for n, a in zip(parameters, of, strict=True)} for of in (gradient, product)]
    return [o.detach().numpy() for o in outputs], *named


def derivatives_of(module, inputs):
    """The same of a module, in its parameters."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return derivatives(lambda: module(*map(torch.as_tensor, inputs)), trained)


def converted_derivatives(apply, parameters, inputs=()):
    """The same of a function of JAX."""

    def loss(parameters):
        return sum(jnp.sum(o**2) / 2 for o in jax.tree.leaves(apply(parameters, *inputs)))

    def product(parameters):
        return jax.vjp(jax.grad(loss), parameters)[1](jax.tree.map(jnp.cos, parameters))[0]

    return jax.tree.leaves(apply(parameters, *inputs)), jax.grad(loss)(parameters), product(parameters)


def assert_close(ours, theirs, rtol=1e-8):
    scale = max([1.0, *(np.abs(a).max() for a in jax.tree.leaves(theirs))])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-10 * scale), ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_hessian_vector_products_are_pytorchs(case):
    module, inputs = made(case)
    converted = fb.from_torch(module, *(a[:1] for a in inputs))
    evaluate = jax.jit(lambda parameters, *inputs: converted_derivatives(converted.apply, parameters, inputs))
    for rows in (3, 1):
        _, inputs = made(case, rows)
        assert_close(evaluate(converted.parameters, *inputs), derivatives_of(module, inputs))


@st.composite
def windows(draw):
    """A convolution's or a pooling's size, stride, padding and dilation, and an input that it fits into."""
    size, stride, dilation = (draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(3))
    padding = tuple(draw(st.integers(0, n // 2)) for n in size)
    least = [d * (n - 1) + 1 for n, d in zip(size, dilation, strict=True)]
    shape = tuple(draw(st.integers(n, n + 4)) for n in least)
    return (size, stride, padding, dilation), shape


@settings(max_examples=10, deadline=None)
@given(windows(), st.sampled_from([1, 2]), st.sampled_from(["convolution", "max", "mean"]))
def test_windows_of_any_size_stride_padding_and_dilation(window, groups, kind):
    (size, stride, padding, dilation), shape = window
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((2, 2, *shape)), "w": rng.standard_normal((4, 2 // groups, *size))}
    theirs = {name: torch.tensor(value, requires_grad=True) for name, value in given.items()}
    ours, torchs = {
        "convolution": (
            lambda x, w: aten.convolution(x, w, None, stride, padding, dilation, False, (0, 0), groups),
            lambda x, w: F.conv2d(x, w, None, stride, padding, dilation, groups),
        ),
        "max": (
            lambda x, w: aten.max_pool(2)(x * w.sum(), size, stride, padding, dilation),
            lambda x, w: F.max_pool2d(x * w.sum(), size, stride, padding, dilation),
        ),
        "mean": (
            lambda x, w: aten.avg_pool(2)(x * w.sum(), size, stride, padding, False, groups == 1),
            lambda x, w: F.avg_pool2d(x * w.sum(), size, stride, padding, False, groups == 1),
        ),
    }[kind]
    evaluate = jax.jit(lambda given: converted_derivatives(lambda p: ours(**p), given))
    assert_close(evaluate(given), derivatives(lambda: torchs(**theirs), theirs))


@pytest.mark.parametrize("case", ["residual", "tied"])
def test_clients_with_parameters_of_their_own_are_computed_together(case):
    module, _ = made(case)
    clients = [made(case, rows=4)[1], [a[::-1].copy() for a in made(case, rows=4)[1]]]
    converted = fb.from_torch(module, *clients[0])
    own = [jax.tree.map(lambda p, k=k: p * (1 + 0.1 * k), converted.parameters) for k in range(2)]
    both = [jax.tree.map(lambda *a: np.stack(a), *of) for of in (own, clients)]
    together = jax.jit(jax.vmap(lambda parameters, inputs: converted_derivatives(converted.apply, parameters, inputs)))(*both)
    for k, (parameters, inputs) in enumerate(zip(own, clients, strict=True)):
        converted.into(module, parameters)
        assert_close(jax.tree.map(lambda a, k=k: a[k], together), derivatives_of(module, inputs))


def test_tied_parameters_are_one_and_constants_are_none():
    assert "last.weight" not in fb.from_torch(made("tied")[0], np.ones((1, 5), int)).parameters
    module, inputs = made("two inputs")
    assert set(fb.from_torch(module, *inputs).parameters) == {"left.weight", "right.weight", "right.bias"}
    assert "0.weight" in fb.from_torch(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval(), np.ones((1, 6))).parameters


def test_parameters_come_back_into_the_module_in_its_precision_and_are_copies():
    module = Tied()
    converted = fb.from_torch(module, np.ones((1, 5), np.int32))
    assert {p.dtype for p in converted.parameters.values()} == {np.dtype(np.float32)}
    before = copy.deepcopy(module.state_dict())
    converted.into(module, jax.tree.map(lambda p: p + 1, converted.parameters))
    after = module.state_dict()
    assert after["last.weight"] is not None and module.last.weight is module.embedding.weight
    for name in before:
        assert after[name].dtype == torch.float32
        np.testing.assert_allclose(after[name], before[name] + 1, rtol=1e-6)
    np.testing.assert_array_equal(converted.parameters["last.bias"], before["last.bias"])


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, slope):
        return -slope


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


REFUSED = {
    "dropout in training": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)),
        r"native_dropout.* in 1 .*module\.eval\(\)",
    ),
    "attention's dropout": (lambda: Calls(lambda y, x: F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)), "random"),
    "random numbers": (lambda: Calls(lambda y, x: y + torch.rand_like(y)), "aten.rand"),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
        r"1\.running_mean.*track_running_stats=False",
    ),
    "a buffer that changes": (Remembers, "changes calls"),
    "an unknown operation": (
        lambda: nn.Sequential(nn.Linear(6, 6), Calls(lambda y, x: y.sort()[0])),
        r"aten\.sort\.default \(in 1\)",
    ),
    "a branch on the input": (lambda: Calls(lambda y, x: y if x.sum() > 0 else x), "cannot be computed: .*data-dependent"),
    "a branch on the rows": (lambda: Calls(lambda y, x: y if x.shape[0] > 3 else x), "number of rows"),
    "one number of rows": (lambda: Calls(lambda y, x: y.view(4, 6)), "cannot be computed"),
    "a backward of its own": (lambda: Calls(lambda y, x: Reversed.apply(y)), "autograd.Function"),
    "another norm": (lambda: Calls(lambda y, x: y.norm(3, dim=1)), "order 3.* take order 2"),
    "the wrong input": (lambda: nn.Linear(5, 3), "cannot be computed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_one_line_at_once(case, capfd):
    make, line = REFUSED[case]
    with pytest.raises(fb.InputError, match=line) as error:
        fb.from_torch(make(), torch.randn(2, 6))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: after_convolution(nn.MaxPool2d(2, ceil_mode=True)), "ceil_mode=True"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), "transposed"),
        (lambda: after_convolution(nn.AdaptiveMaxPool2d(2)), "adaptive_max_pool2d"),
    ],
)
def test_layers_that_cannot_be_converted_are_named(make, line):
    with pytest.raises(fb.InputError, match=line):
        fb.from_torch(make(), np.ones((1, *IMAGE)))


def test_what_is_given_must_fit():
    module = nn.Linear(6, 4)
    for arguments in [(lambda x: x, np.ones((1, 6))), (module,), (module, np.float32(1)), (module, np.ones((0, 6)))]:
        with pytest.raises(fb.InputError, match="must be"):
            fb.from_torch(*arguments)
    converted = fb.from_torch(module, np.ones((1, 6)))
    for parameters, inputs in [
        ({}, [np.ones((2, 6))]),
        (converted.parameters, [np.ones((2, 5))]),
        (converted.parameters, [np.ones(6)]),
        (converted.parameters, []),
        ({**converted.parameters, "bias": np.ones(5)}, [np.ones((2, 6))]),
    ]:
        with pytest.raises(fb.InputError, match=r"(parameters|inputs) must be"):
            converted.apply(parameters, *inputs)
    with pytest.raises(fb.InputError, match="parameters must be"):
        converted.into(module, {"weight": np.ones((4, 6))})
    with pytest.raises(fb.InputError, match="a parameter weight of shape"):
        converted.into(nn.Linear(5, 4), converted.parameters)


def test_pytorch_is_imported_only_for_a_conversion(monkeypatch):
    code = "import sys, fedbilevel; fedbilevel.from_torch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(fb.InputError, match=r"pip install 'fedbilevel\[torch\]'"):
        fb.from_torch(nn.Linear(1, 1), np.ones((1, 1)))


def test_weight_norm_has_the_differences_of_pytorchs_gradients():
    """PyTorch's own second derivatives of it are not those of its gradient."""
    module = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)).double()
    inputs = [np.random.default_rng(0).standard_normal((3, 6))]
    converted = fb.from_torch(module, *inputs)
    _, gradient, product = converted_derivatives(converted.apply, converted.parameters, inputs)
    assert_close(gradient, derivatives_of(module, inputs)[1])
    ends = []
    for step in (1e-5, -1e-5):
        converted.into(module, jax.tree.map(lambda p, step=step: p + step * jnp.cos(p), converted.parameters))
        ends.append(derivatives_of(module, inputs)[1])
    jax.tree.map(lambda h, a, b: np.testing.assert_allclose(h, (a - b) / 2e-5, rtol=1e-6, atol=1e-6), product, *ends)


def test_both_engines_move_a_convolutional_network_alike_with_unequal_clients():
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)).double()
    rng = np.random.default_rng(0)
    clients = [{"image": rng.standard_normal((rows, *IMAGE)), "target": rng.standard_normal((rows, 3))} for rows in (4, 7, 3)]
    network = fb.from_torch(module, clients[0]["image"])

    def f(x, y, rows):
        return ((network.apply(y, rows["image"]) - rows["target"]) ** 2).mean()

    def g(x, y, rows):
        return f(x, y, rows) + jnp.exp(x) * sum(jnp.sum(p**2) for p in y.values())

    algorithm = fb.SimFBO()
    problem, x, y, *_ = from_trees(f, g, jnp.zeros(()), network.parameters, UNCONSTRAINED)
    population = Population.build(problem, clients, clients)
    simulator, (federation, _) = SimulatedEngine(population, Everyone()), deployed(algorithm, population, Everyone(), (x, y))
    ours, *_ = jax.jit(simulator.init)(algorithm, x, y, jax.random.key(0))
    theirs, *_ = federation.init(algorithm, x, y, jax.random.key(0))
    for k in range(2):
        ours, *_ = jax.jit(simulator.step)(algorithm, ours, jax.random.key(k))
        theirs, *_ = federation.step(algorithm, theirs, jax.random.key(k))
    for a, b in [(ours.x, theirs.x), (ours.y, theirs.y)]:
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
