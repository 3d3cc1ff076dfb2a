"""PyTorch modules as parameters and a pure function of them: `pip install 'fedbilevel[torch]'`.

A module is traced by `torch.export`, which follows what its `forward` does rather than how it is written, for any number of
rows; what `aten` has no function for, PyTorch's own decompositions express by what it has. (A symbolic trace of `torch.fx`
stops at any branch on an input, such as attention's; torchax replaces PyTorch's functions globally, and does not import with
PyTorch 2.13.) A trace does not keep all that a module can do, such as the backward of an `autograd.Function`: the function is
therefore compared with the module, outputs and gradients on the given rows, before it is handed out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.errors import InputError, computing, require
from fedbilevel.tasks.models.aten import OPERATIONS

MEANINGLESS = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}  # to JAX
FEWER_ROWS = 2**31  # than any client has
AGREEMENT = 0.03  # of an array's largest entry: above the rounding of any precision, below what another function would give
NOISE = 1e-3  # of the largest entry of all arrays: what rounding may leave of a gradient that is 0


@dataclass(frozen=True, eq=False)
class Converted:
    """A module's trainable parameters by their names in it, and `apply(parameters, *inputs)`, a pure function of JAX.

    Each input has a row per sample. The function has derivatives of any order, under `jit`, `vmap` and `grad`.
    """

    parameters: dict[str, Array]
    apply: Callable[..., Any]

    def into(self, module: Any, parameters: Mapping[str, Array]) -> None:
        """Put parameters, such as those that `solve` found, into the module or into one of the same shapes."""
        check_parameters(self.parameters, parameters)
        torch = imported_torch()
        state = {name: torch.as_tensor(np.array(value, np.float64)) for name, value in parameters.items()}
        own = module.state_dict()
        for name, value in state.items():
            fits = name in own and own[name].shape == value.shape
            require(fits, "module", f"one with a parameter {name} of shape {list(value.shape)}", type(module).__name__)
        module.load_state_dict(state, strict=False)


def from_torch(module: Any, *inputs: Any) -> Converted:
    """Convert a `torch.nn.Module` to parameters and a pure function `apply(parameters, *inputs)`.

        model = fb.from_torch(module, images[:1])
        model.apply(model.parameters, images)       # what module(images) gives, for any number of rows
        model.into(module, solution.y)              # the learned parameters, back in the module

    Parameters that require no gradients and buffers are constants; tied parameters are one, under their first name. The
    module's mode is kept: dropout needs `module.eval()`. BatchNorm in `eval()` uses its running statistics, and with
    `track_running_stats=False` those of the rows given together, which makes a loss no mean over rows.

    Args:
        module: in the mode and with the parameters to convert.
        inputs: what `forward` takes, arrays or tensors with at least one row each; the rows' values only serve to compare
            the function with the module. Doubles need `JAX_ENABLE_X64=1`, and are float32 without.

    Raises:
        InputError: the module is random, changes its buffers, or does what cannot be converted, which the line names.
    """
    torch = imported_torch()
    require(isinstance(module, torch.nn.Module), "module", "a torch.nn.Module", module)
    require(len(inputs) > 0, "inputs", "what the module's forward takes, with at least one row each", inputs)
    examples = tuple(example(torch, module, value) for value in inputs)
    parameters = {name: copied(p) for name, p in module.named_parameters() if p.requires_grad}
    program = exported(torch, module, examples)
    refuse(module, program)
    converted = Converted(parameters, function(torch, module, program, parameters))
    compare(torch, module, converted, examples)
    return converted


def imported_torch() -> Any:
    """PyTorch, or a line on how to get it."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise InputError("from_torch needs PyTorch: pip install 'fedbilevel[torch]'") from None


def check_parameters(wanted: Mapping[str, Array], given: Any) -> None:
    """Raise `InputError` unless names and shapes are the same."""
    shapes = [{k: jnp.shape(v) for k, v in p.items()} if isinstance(p, Mapping) else p for p in (wanted, given)]
    require(shapes[0] == shapes[1], "parameters", f"a dictionary of arrays of these shapes: {shapes[0]}", shapes[1])


def copied(tensor: Any) -> Array:
    """A tensor as an array with memory of its own."""
    tensor = tensor.detach().cpu()
    values = tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
    return jnp.array(values, dtype(tensor.dtype))


def dtype(of_torch: Any) -> np.dtype:
    """The type of numbers that JAX has for one of PyTorch's."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(str(of_torch).removeprefix("torch.")))


def example(torch: Any, module: Any, value: Any) -> Any:
    """Rows of an input as a tensor that suits the module: at least two, since a program for one row is for no other number."""
    with computing("a tensor of an input"):
        rows = value if isinstance(value, torch.Tensor) else torch.tensor(np.asarray(value))
    require(rows.ndim > 0 and len(rows) > 0, "inputs", "arrays with at least one row", list(rows.shape))
    own = next((p for p in module.parameters() if p.is_floating_point()), rows)
    kind = own.dtype if rows.is_floating_point() else torch.int64 if rows.dtype == torch.int32 else rows.dtype
    return torch.cat([rows, rows]).detach().to(own.device, kind)


def exported(torch: Any, module: Any, examples: tuple[Any, ...]) -> Any:
    """The module as a program of operations, those of ours where we have them and PyTorch's core ones elsewhere."""
    with computing(f"the program of {name(module)}"), quietly(torch):
        decompositions = torch.export.default_decompositions()
        for operation in list(decompositions):
            if found(operation):
                decompositions.pop(operation)
        program = traced(torch, module, examples)
        detach_blocks(torch, program.graph)
        return program.run_decompositions(decompositions)


def traced(torch: Any, module: Any, examples: tuple[Any, ...]) -> Any:
    """The module's trace for any number of rows."""
    export = partial(
        torch.export.export, module, examples, dynamic_shapes=tuple({0: torch.export.Dim.DYNAMIC} for _ in examples)
    )
    try:
        return export(strict=False)
    except Exception:  # the strict trace reads the module's code: it takes longer, refuses more, and does not fix len(input)
        return export(strict=True)


def detach_blocks(torch: Any, graph: Any) -> None:
    """Detach what comes out of `torch.no_grad` blocks, which decompositions dissolve."""
    blocks = [n for n in graph.nodes if str(n.target) == "wrap_with_set_grad_enabled" and n.args[0] is False]
    for output in [user for block in blocks for user in list(block.users)]:
        with graph.inserting_after(output):
            detached = graph.call_function(torch.ops.aten.detach.default, (output,))
        output.replace_all_uses_with(detached, lambda user, detached=detached: user is not detached)
        detached.meta.update(output.meta)


@contextlib.contextmanager
def quietly(torch: Any) -> Iterator[None]:
    """Within it PyTorch does not warn, log or print, and attention is not one opaque operation."""
    fast, logged = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logged)
        torch.backends.mha.set_fastpath_enabled(fast)


def name(module: Any) -> str:
    """What a message calls a module."""
    return f"the module {type(module).__name__}"


def found(operation: Any) -> Callable[..., Any] | None:
    """Our function for an operation of a program: arithmetic of sizes is Python's own."""
    if operation.__module__ in ("_operator", "math"):
        return operation
    full = str(operation).removeprefix("aten.")
    return OPERATIONS.get(full) or OPERATIONS.get(full.split(".")[0])


def place(node: Any) -> str:
    """Where in the module an operation was called."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack and stack[-1][0] else "forward"


def refuse(module: Any, program: Any) -> None:
    """Raise `InputError` if the program is not pure, or has an operation that we have not."""
    signature = program.graph_signature
    changed = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    if changed:
        raise InputError(
            f"{name(module)} changes {', '.join(changed.values())} when called, so it is no pure function: for the running "
            "statistics of BatchNorm, call module.eval() or give it track_running_stats=False"
        )
    if any(rows.lower > 2 or rows.upper < FEWER_ROWS for rows in program.range_constraints.values()):
        raise InputError(f"{name(module)} branches on the number of rows: let it do the same for any number")
    unknown = [f"{node.target} (in {place(node)})" for node in calls(program) if not found(node.target)]
    if unknown:
        listed = ", ".join(dict.fromkeys(unknown))
        raise InputError(f"{name(module)} uses what cannot be converted: {listed}; write that part in other operations")


def calls(program: Any) -> list[Any]:
    """The operations of a program, in order."""
    return [node for node in program.graph.nodes if node.op == "call_function"]


def function(torch: Any, module: Any, program: Any, start: Mapping[str, Array]) -> Callable[..., Any]:
    """The program as a function of JAX."""
    first_names = {id(p): own for own, p in module.named_parameters()}
    tensors = {**program.state_dict, **program.constants, **dict(module.named_parameters(remove_duplicate=False))}
    specs = program.graph_signature.input_specs
    sources = {spec.arg.name: first_names.get(id(tensors.get(spec.target)), spec.target) for spec in specs}
    trained = {key: source for key, source in sources.items() if source in start}
    constants = {key: copied(tensors[source]) for key, source in sources.items() if source and source not in start}
    rows = {node.name: tuple(node.meta["val"].shape[1:]) for node in program.graph.nodes if sources.get(node.name, "") is None}
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    steps: list[tuple[Any, Any]] = [(node, found(node.target)) for node in calls(program)]

    def apply(parameters: Mapping[str, Array], *inputs: Any) -> Any:
        check_parameters(start, parameters)
        check_inputs(list(rows.values()), inputs)
        values = constants | {key: parameters[own] for key, own in trained.items()}
        values |= {key: jnp.asarray(given) for key, given in zip(rows, inputs, strict=True)}

        def given(argument: Any) -> Any:
            if isinstance(argument, torch.fx.Node):
                return values[argument.name]
            return dtype(argument) if isinstance(argument, torch.dtype) else argument

        for node, operation in steps:
            options = {key: value for key, value in node.kwargs.items() if key not in MEANINGLESS}
            arguments, options = torch.fx.node.map_aggregate((node.args, options), given)
            with computing(f"{node.target} in {place(node)} of {name(module)}"):
                values[node.name] = operation(*arguments, **options)
        return program.call_spec.out_spec.unflatten(torch.fx.node.map_aggregate(output.args[0], given))

    return apply


def check_inputs(rows: list[tuple[int, ...]], inputs: tuple[Any, ...]) -> None:
    """Raise `InputError` unless each input consists of rows of its shape."""
    shapes = [jnp.shape(given) for given in inputs]
    fit = len(shapes) == len(rows) and all(given[:1] and given[1:] == row for given, row in zip(shapes, rows, strict=True))
    wanted = ", ".join(f"[rows, {', '.join(map(str, row))}]" if row else "[rows]" for row in rows)
    require(fit, "inputs", f"arrays of the shapes {wanted}", [list(shape) for shape in shapes])


def compare(torch: Any, module: Any, converted: Converted, examples: tuple[Any, ...]) -> None:
    """Raise `InputError` unless the function and the module agree on the examples, in outputs and in gradients."""

    def floating(outputs: Any) -> list[Any]:
        leaves = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, torch.Tensor | Array)]
        return [leaf for leaf in leaves if jnp.issubdtype(dtype(leaf.dtype), jnp.floating)]

    trained = {own: p for own, p in module.named_parameters() if p.requires_grad}
    with torch.enable_grad(), quietly(torch):
        theirs = floating(module(*examples))
        weights = [np.random.default_rng(0).standard_normal(output.shape) for output in theirs]
        products = [(o * torch.as_tensor(w).to(o)).sum() for o, w in zip(theirs, weights, strict=True)]
        total = sum(products, torch.zeros(()))
        known = bool(trained) and total.requires_grad
        slopes = torch.autograd.grad(total, list(trained.values()), allow_unused=True) if known else [None] * len(trained)
    inputs = [copied(value) for value in examples]
    ours, pull = jax.vjp(jax.jit(lambda parameters: floating(converted.apply(parameters, *inputs))), converted.parameters)
    if not agree(ours, [copied(output) for output in theirs]):
        raise InputError(f"{name(module)} gives other outputs than its trace: is it random, or does it branch on an input?")
    (gradient,) = pull([jnp.asarray(w, output.dtype) for w, output in zip(weights, ours, strict=True)])
    wanted = [p.new_zeros(p.shape) if slope is None else slope for p, slope in zip(trained.values(), slopes, strict=True)]
    if not agree([gradient[own] for own in trained], [copied(slope) for slope in wanted]):
        raise InputError(
            f"{name(module)} has other gradients than its trace, which does not keep the backward of an autograd.Function: "
            "write it with detach()"
        )


def agree(ours: list[Array], theirs: list[Array]) -> bool:
    """Whether arrays differ by no more than rounding."""
    sizes = [float(jnp.max(jnp.abs(jnp.nan_to_num(a)), initial=0)) for a in theirs]
    noise = NOISE * max([1.0, *sizes])
    return [a.shape for a in ours] == [a.shape for a in theirs] and all(
        np.allclose(a, b, 0, AGREEMENT * size + noise, equal_nan=True) for a, b, size in zip(ours, theirs, sizes, strict=True)
    )
