"""A call of a function of torch with global tensors: on shards, on full tensors, or a write."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.layouts import Layout, to_placements
from autoshard.runtime.global_tensors.checks import check_plain, drawn_alike, say_gathered
from autoshard.runtime.global_tensors.dtensors import (
    from_local,
    full_tensor,
    local_tensor,
    store_full,
)
from autoshard.runtime.global_tensors.metadata import is_shaped_alike
from autoshard.runtime.global_tensors.on_shards import Rule, TorchCall, run_on_shards
from autoshard.runtime.global_tensors.origins import (
    Replay,
    count_write,
    fresh,
    note_use,
    origin_of,
    replace_contents,
    set_origin,
    without_memory,
)
from autoshard.runtime.global_tensors.placed import Placed
from autoshard.runtime.global_tensors.rules import operator_rule, rule_of
from autoshard.runtime.global_tensors.writes import (
    check_unsaved,
    check_writable,
    has_inplace,
    without_inplace,
    write_on_shards,
    writes,
)
from autoshard.torch_private import pytree, schema_of, shares_memory, version_counter


@dataclass(frozen=True, slots=True)
class TensorClass:
    """A class of global tensors.

    Attributes:
        of: makes a DTensor one of the class.
        stays_shared: True if what is whole on every rank is returned as a DTensor too.
    """

    of: Callable[[DTensor], DTensor]
    stays_shared: bool = False


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The arguments of a call as a flat list.

    Attributes:
        function: of torch.
        leaves: the arguments.
        spec: their structure.
        kind: of the tensors that are returned.
        is_operator: True for an operator below autograd: it returns DTensors.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    kind: TensorClass
    is_operator: bool = False

    @property
    def shared(self) -> dict[int, DTensor]:
        """The DTensors by index."""
        return {n: x for n, x in enumerate(self.leaves) if isinstance(x, DTensor)}

    @property
    def plain(self) -> list[torch.Tensor]:
        """The plain tensors."""
        return [
            x for x in self.leaves if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        ]

    @property
    def outputs(self) -> set[int]:
        """Indices of the leaves into which an operator writes; functions count writes instead."""
        if not self.is_operator:
            return set()
        args, kwargs = self.with_leaves(self.leaves)
        operator: Any = self.function
        schema = schema_of(operator)
        written = [
            id(x)
            for n, one in enumerate(schema.arguments)
            if one.alias_info is not None and one.alias_info.is_write
            for x in pytree.tree_leaves(args[n] if n < len(args) else kwargs.get(one.name))
        ]
        return {n for n, x in enumerate(self.leaves) if id(x) in written}

    def with_leaves(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in their structure, with other leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def replay(self, place: int, number: int) -> Replay:
        """The call, to be repeated on other contents of one of its tensors."""
        args, kwargs = self.with_leaves(self.leaves)
        return Replay(self.function, args, kwargs, place, number)


def run(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kind: TensorClass
) -> Any:
    """Run a function of torch whose arguments have a global tensor."""
    if has_inplace(function, args, kwargs):
        return _inplace(function, args, kwargs, kind)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            fresh(leaf)
    call = _Arguments(function, leaves, spec, kind)
    if is_shaped_alike(function):
        return _shaped_alike(call)
    if kwargs.get("out") is not None:
        return _on_full_tensors(call)
    rule = rule_of(function)
    found = _on_shards(call, rule) if rule is not None else None
    target = leaves[0]
    if found is None and isinstance(target, DTensor) and writes(function, kwargs):
        check_writable(target)
        if origin_of(target) is None and _written_on_shards(call):
            return None if function.__name__ == "__setitem__" else target
        return _on_full_tensors(call)
    result = _on_full_tensors(call) if found is None else found[0]
    note_use(call.shared.values(), result)
    return result


def run_operator(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: TensorClass
) -> Any:
    """Run an operator below autograd on DTensors that are parameters or computed from them.

    The result shares memory with an argument where shards are views of its shards; a view that
    had to be gathered is a global tensor. All others are DTensors.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    call = _Arguments(operator, leaves, spec, kind, is_operator=True)
    rule = None if schema_of(operator).is_mutable else operator_rule(operator)
    found = _on_shards(call, rule) if rule is not None else None
    return _on_full_tensors(call) if found is None else found[0]


def of_placed(placed: Placed, kind: TensorClass) -> DTensor:
    """The global tensor of which each rank has a part."""
    tensor = kind.of(from_local(placed.local, placed.mesh, placed.placements, placed.shape))
    if tensor.requires_grad and not tensor.is_leaf:
        layout = placed.layout
        tensor.register_hook(  # type: ignore[no-untyped-call]  # torch
            lambda gradient: placed_as(gradient, placed.mesh, layout)
        )
    return tensor


def placed_as(gradient: torch.Tensor | None, mesh: DeviceMesh, layout: Layout) -> DTensor | None:
    """A gradient in the layout of its tensor; a plain one is the whole gradient."""
    if gradient is None:  # of a result that does not depend on the tensor
        return None
    if isinstance(gradient, DTensor):
        if gradient.placements == to_placements(layout, tuple(mesh.shape)):
            return gradient
        found = Placed.of(gradient)
    else:
        found = Placed.plain(gradient, mesh)
    part = found.resharded(layout)
    return from_local(part.local, mesh, part.placements, part.shape)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor whose gradient is plain, also if a DTensor is added to it."""
    if tensor.requires_grad and not tensor.is_leaf:
        tensor.register_hook(full_tensor)  # type: ignore[no-untyped-call]  # torch
    return tensor


def _placed(call: _Arguments) -> tuple[list[Any], DeviceMesh] | None:
    """The leaves with a `Placed` for each tensor; None if there are several meshes."""
    meshes = {tensor.device_mesh for tensor in call.shared.values()}
    if len(meshes) != 1:
        return None
    (mesh,) = meshes
    leaves: list[Any] = []
    for leaf in call.leaves:
        if isinstance(leaf, DTensor):
            leaves.append(Placed.of(leaf))
        else:
            is_tensor = isinstance(leaf, torch.Tensor)
            leaves.append(Placed.plain(leaf, mesh) if is_tensor else leaf)
    return leaves, mesh


def _computed(call: _Arguments, rule: Rule) -> tuple[Any, dict[int, Placed]] | None:
    """The result of a rule, and the parts that it read, by index of the leaves of the call.

    None if the rule does not apply, or nothing would be sharded.
    """
    found = _placed(call)
    if found is None:
        return None
    placed, mesh = found
    args, kwargs = call.with_leaves(placed)
    sharded = rule(TorchCall(call.function, args, kwargs))
    if sharded is None:
        return None
    check_plain(call.function, call.plain, mesh)
    computed = run_on_shards(sharded)
    if computed is None:
        return None
    result, read = computed
    parts = dict(zip(map(id, sharded.tensors), read, strict=True))
    return result, {n: parts[id(x)] for n, x in enumerate(placed) if id(x) in parts}


def _on_shards(call: _Arguments, rule: Rule) -> tuple[Any] | None:
    """The result of a call on shards, in a tuple; None if nothing of it would be sharded."""
    computed = _computed(call, rule)
    if computed is None:
        return None
    leaves, spec = pytree.tree_flatten(computed[0])
    bases = {n: computed[1][n].local for n in call.shared}
    wrapped = [
        _result(call, bases, number, leaf) if isinstance(leaf, Placed) else leaf
        for number, leaf in enumerate(leaves)
    ]
    return (pytree.tree_unflatten(wrapped, spec),)


def _result(
    call: _Arguments, bases: Mapping[int, torch.Tensor], number: int, result: Placed
) -> torch.Tensor:
    """The tensor that a call returns: an argument, a view of one, or a new one.

    Args:
        call: the call.
        bases: what the function was given for each DTensor among the leaves.
        number: of the result.
        result: this rank's part of it.
    """
    alike = _Aliases.of(call, bases, number, result.local)
    if alike.same is not None:
        return call.shared[alike.same]
    if call.is_operator:
        return _operator_result(call, alike.view, number, result)
    if alike.is_copied:
        result = replace(result, local=result.local.clone())
    if alike.view is None and not (result.is_sharded or call.kind.stays_shared):
        return _plain(result.local)
    wrapped = of_placed(result, call.kind)
    if alike.view is not None:
        set_origin(wrapped, call.shared[alike.view], call.replay(alike.view, number))
    return wrapped


_VIEWS_BY_STRIDES = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as"})
"""Functions that return a view or a copy, as the strides of the tensor are."""


@dataclass(frozen=True, slots=True)
class _Aliases:
    """The DTensor among the leaves of a call that its result is, or is a view of.

    Attributes:
        same: its index, if the result is that tensor.
        view: its index, if the result is a view of it.
        is_copied: True if one device copies, but this rank's part shares memory nevertheless.
    """

    same: int | None
    view: int | None
    is_copied: bool = False

    @classmethod
    def of(
        cls, call: _Arguments, bases: Mapping[int, torch.Tensor], number: int, result: torch.Tensor
    ) -> "_Aliases":
        """Find it, as on one device, whatever this rank's part needs.

        The memory of a shard does not tell for functions that copy where strides demand it.
        """
        here = cls._in_memory(bases, result)
        if call.function.__name__ not in _VIEWS_BY_STRIDES:
            return here
        leaves = [without_memory(x) if isinstance(x, torch.Tensor) else x for x in call.leaves]
        args, kwargs = call.with_leaves(leaves)
        result = pytree.tree_leaves(call.function(*args, **kwargs))[number]
        alike = cls._in_memory({n: leaves[n] for n in bases}, result)
        return replace(alike, is_copied=alike.view is None and here.view is not None)

    @classmethod
    def _in_memory(cls, bases: Mapping[int, torch.Tensor], result: torch.Tensor) -> "_Aliases":
        same = (n for n, base in bases.items() if result is base)
        views = (n for n, base in bases.items() if shares_memory(result, base))
        return cls(next(same, None), next(views, None))


def _operator_result(
    call: _Arguments, base: int | None, number: int, result: Placed
) -> torch.Tensor:
    """The tensor that an operator returns.

    Norms of planned and of other parameters, stacked, are plain, since PyTorch combines what is
    computed from them with gradients of both.
    """
    is_mixed = any(x.is_floating_point() for x in call.plain) and not torch.is_grad_enabled()
    if is_mixed and base is None and not result.is_sharded:
        return result.local
    wrapped = from_local(result.local, result.mesh, result.placements, result.shape)
    if base is not None and not _is_view_of_shard(result.local, call.shared[base]):
        wrapped = call.kind.of(wrapped)
        set_origin(wrapped, call.shared[base], call.replay(base, number))
    return wrapped


def _is_view_of_shard(local: torch.Tensor, base: DTensor) -> bool:
    """True if a write into a view of a DTensor writes into its shard as well."""
    return origin_of(base) is None and shares_memory(local, local_tensor(base))


def _shaped_alike(call: _Arguments) -> Any:
    """Run a function that only takes the shape of a tensor."""
    mesh = next(iter(call.shared.values())).device_mesh
    leaves = [
        x.to_local().new_empty(1).expand(x.shape) if isinstance(x, DTensor) else x
        for x in map(_detached, call.leaves)
    ]
    args, kwargs = call.with_leaves(leaves)
    with drawn_alike(mesh):
        return call.function(*args, **kwargs)


def _inplace(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kind: TensorClass
) -> Any:
    """Run a function out of place, and give its first argument the contents of the result."""
    plain_args, plain_kwargs = without_inplace(function, args, kwargs)
    target = args[0] if args else kwargs["input"]
    result = function(*plain_args, **plain_kwargs)
    return run(torch.Tensor.copy_, (target, result), {}, kind)


def _written_on_shards(call: _Arguments) -> bool:
    """Write into the shards of the first argument, and tell whether that was possible."""
    computed = _computed(call, write_on_shards)
    if computed is None:
        return False
    check_unsaved(call.leaves[0])
    replace_contents(call.leaves[0], of_placed(computed[0], call.kind))
    return True


def store(full: torch.Tensor, target: DTensor, kind: TensorClass) -> None:
    """Give a global tensor other contents; those of a view are written into its base."""
    check_unsaved(target)
    replays = []
    while (origin := origin_of(target)) is not None:
        replays.append(origin.replay)
        target = origin.base
    if replays:
        base = Placed.of(target).full().clone()
        view = base
        for replay in reversed(replays):
            view = replay.on(view)
        view.copy_(full)
        full = base
    if type(target) is DTensor:
        store_full(full, target)  # a parameter, whose memory buckets and optimizers know
        count_write(target)
    else:
        part = Placed.plain(full, target.device_mesh).resharded(Placed.of(target).layout)
        replace_contents(target, of_placed(part, kind))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _on_full_tensors(call: _Arguments) -> Any:
    """Run a function on the full tensors on every rank; what it writes reaches the shards."""
    shared = call.shared
    mesh = next(iter(shared.values())).device_mesh
    check_plain(call.function, call.plain, mesh)
    placed = {n: Placed.of(tensor) for n, tensor in shared.items()}
    full = {n: part.full() for n, part in placed.items()}
    if call.is_operator:  # DTensors claim the strides of contiguous tensors
        full = {n: one.contiguous() for n, one in full.items()}
    if call.outputs or writes(call.function, call.with_leaves(call.leaves)[1]):
        # Tensors of inference mode do not count writes.
        with (
            torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
        ):
            full = {n: one.clone() for n, one in full.items()}
    num_bytes = sum(part.moved_bytes() for part in placed.values())
    say_gathered(call.function, num_bytes, mesh, is_state=call.kind.stays_shared)
    versions = {n: version_counter(one) for n, one in full.items()}
    args, kwargs = call.with_leaves([full.get(n, x) for n, x in enumerate(call.leaves)])
    with drawn_alike(mesh):
        result = call.function(*args, **kwargs)
    outputs = call.outputs
    for n, one in full.items():
        if n in outputs or version_counter(one) != versions[n]:
            store(one, shared[n], call.kind)
    return _wrapped(call, result, full, mesh)


def _wrapped(
    call: _Arguments, result: Any, full: Mapping[int, torch.Tensor], mesh: DeviceMesh
) -> Any:
    leaves, spec = pytree.tree_flatten(result)
    wrapped = [
        _result(call, full, number, Placed.plain(leaf, mesh))
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
        else leaf
        for number, leaf in enumerate(leaves)
    ]
    return pytree.tree_unflatten(wrapped, spec)
