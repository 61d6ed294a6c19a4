"""Modules that are kept whole: the kernel calls the module of the model itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import ExportError, PlanError
from autoshard.graph import OpaqueCall
from autoshard.graph.export.opaque_modules import call_module, tensors_of
from autoshard.runtime.checks.call_structure import read_spec
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Step
from autoshard.torch_private import pytree


def bind_module(local: LocalNode) -> LocalKernel:
    """The kernel of an opaque module.

    Raises:
        PlanError: the program runs without the model, or the model has no such module.
    """
    name = local.node.module
    if local.model is None:
        raise PlanError(f"the opaque module {name!r} runs only with the model: use parallelize")
    try:
        module = local.model.get_submodule(name)
    except AttributeError:
        raise PlanError(f"the model has no module {name!r}, which the plan keeps whole") from None
    call = OpaqueCall.from_json(local.node.argument("call"))
    spec = read_spec(call.arguments)
    literals = dict(call.literals)
    device = local.place.device
    is_random = bool(local.node.argument("random"))
    num_tensors = local.names().count("tensors")
    dtypes = [str(dtype) for _, dtype in call.results]
    shapes = list(zip(local.output_shapes[: len(dtypes)], dtypes, strict=True))

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors[:num_tensors])
        leaves = [literals[i] if i in literals else next(rest) for i in range(spec.num_leaves)]
        arguments: Any = pytree.tree_unflatten(leaves, spec)
        state = dict(zip(call.state, tensors[num_tensors:], strict=True))
        state |= {name: state[name].clone() for name in call.updated}
        before = None if is_random else _generator_state(device)
        made = _run(module, arguments, state, call, shapes)
        after = None if is_random else _generator_state(device)
        if before is not None and after is not None and not torch.equal(before, after):
            raise ExportError(
                "it draws random numbers, which it did not when exported, so ranks would draw "
                "different ones; export it in the mode in which it runs"
            )
        return made

    def named(tensors: Sequence[torch.Tensor], step: Step) -> tuple[torch.Tensor, ...]:
        try:
            return run(tensors, step)
        except ExportError as error:
            raise PlanError(f"the opaque module {name!r}: {error}") from None

    return named


def _generator_state(device: torch.device) -> torch.Tensor | None:
    """The state of the generator of a device; None while torch.compile traces."""
    if torch.compiler.is_compiling():
        return None
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def _run(
    module: nn.Module,
    arguments: Any,
    state: dict[str, torch.Tensor],
    call: OpaqueCall,
    shapes: Sequence[tuple[tuple[int, ...], str]],
) -> tuple[torch.Tensor, ...]:
    """Call a module; its results, then the new contents of buffers."""
    result, changed = call_module(module, arguments, state)
    results = tensors_of(result)
    found = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in results]
    if found != list(shapes):
        raise ExportError(f"it returns {found}, but when it was exported {list(shapes)}")
    unknown = sorted(changed.keys() - set(call.updated))
    if unknown:
        raise ExportError(f"it updates its buffer {unknown[0]!r}, which it did not when exported")
    return (*results, *(changed.get(name, state[name]).detach() for name in call.updated))
