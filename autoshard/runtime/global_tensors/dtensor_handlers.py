"""Handlers for operators on the DTensors of planned models: parameters, gradients, their states.

Training loops call operators on them that PyTorch computes wrongly or not at all: sums of partial
norms, views of shards that interleave, writes into rows of a sharded dim, random numbers on a CPU,
fused SGD, `GradScaler`. Operators of elements and the fused or `foreach` operators of optimizers
are DTensor's own, but take plain tensors too; all others have the rules of `global_tensors`, and
gather where these have none.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.errors import PlanError
from autoshard.runtime.global_tensors.calls import placed_as, run_operator, store
from autoshard.runtime.global_tensors.checks import check_plain, drawn_alike
from autoshard.runtime.global_tensors.dtensors import (
    PLANNED_MESHES,
    from_local,
    full_tensor,
    local_tensor,
    support_checkpoints,
)
from autoshard.runtime.global_tensors.global_tensor import StateTensor
from autoshard.runtime.global_tensors.origins import is_replaced, origin_of
from autoshard.runtime.global_tensors.placed import Placed
from autoshard.torch_private import (
    operator_handlers,
    operator_names,
    overload_name,
    pytree,
    schema_of,
    stored_shard,
    take_shard,
)

_ATEN: Any = torch.ops.aten
_RANDOM = (
    _ATEN.normal_.default,
    _ATEN.uniform_.default,
    _ATEN.bernoulli_.float,
    _ATEN.randn_like.default,
    _ATEN.rand_like.default,
)
"""Operators that `torch.nn.init` and noise draw with."""

_MASKED = (_ATEN.masked_fill_.Scalar, _ATEN.masked_fill_.Tensor)
"""Operators of elements that `w[mask] = 0.0` is since PyTorch 2.15, where the mask may be plain."""

_DRAWN_DIFFERENTLY = (
    "parameters are initialised from random numbers that differ between ranks: call "
    "torch.manual_seed with one seed on all ranks before, or initialise the model before "
    "parallelize"
)

_UNSCALE = _ATEN._amp_foreach_non_finite_check_and_unscale_.default
_NUMBER = _ATEN._local_scalar_dense.default  # noqa: SLF001  an operator
_LISTS = ("_foreach_", "_fused_adagrad", "_fused_adam", "_fused_sgd")
"""Beginnings of the names of operators of elements of many tensors: those of optimizers."""

_NORMS = _ATEN._foreach_norm.Scalar  # noqa: SLF001  an operator
_OWN = frozenset(
    """
    _has_same_storage_numel _make_per_tensor_quantized_tensor _pin_memory _to_copy alias clone
    contiguous detach empty_like equal full_like is_pinned is_same_size lift_fresh new_empty
    new_empty_strided new_full new_ones new_zeros ones_like record_stream set_ to zero_ zeros_like
    """.split()  # noqa: SIM905  a table of words
)
"""Operators of DTensor itself that neither mix elements nor reduce them."""

FURTHER_GROUPS: list[Callable[[Sequence[torch.Tensor]], Sequence[ProcessGroup]]] = []
"""Functions that name further ranks with gradients of the same model as some gradients."""


def install_dtensor_handlers(mesh: DeviceMesh) -> None:
    """Register the handlers, for all DTensors on the mesh of a planned model."""
    support_checkpoints(mesh)
    handlers = operator_handlers()
    if _NUMBER in handlers:
        return
    handlers.update(_own_handlers())
    handlers[_UNSCALE] = _unscale
    handlers[_NUMBER] = _number
    handlers.update(dict.fromkeys(_RANDOM, _random))
    handlers[_NORMS] = _norms
    handlers.update(dict.fromkeys((_ATEN.fill_.Tensor, _ATEN.fill_.Scalar), _fill))
    handlers.update(dict.fromkeys(_MASKED, _by_rule))
    handlers[_ATEN.copy_.default] = _copy
    patched: Any = DTensor
    patched.__deepcopy__ = _deepcopy
    patched.data = property(_DATA.__get__, _set_data)


def _own_handlers() -> Mapping[Any, Callable[..., Any]]:
    """Handlers of all operators of ATen but those that DTensor itself runs."""
    names = (name.removeprefix("aten::") for name in operator_names())
    found: dict[Any, Callable[..., Any]] = {}
    for name in names:
        packet, _, overload = name.partition(".")
        if "::" in name or packet in _OWN or packet.startswith("_amp_"):
            continue
        operator = getattr(getattr(_ATEN, packet, None), overload or "default", None)
        if operator is None:
            continue
        if packet.startswith(_LISTS):
            found[operator] = _of_lists
        elif torch.Tag.pointwise not in operator.tags:
            found[operator] = _by_rule
        elif sum(str(one.type) == "Tensor" for one in schema_of(operator).arguments) > 1:
            found[operator] = _of_elements
    return found


def _by_rule(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator by its rule, or on full tensors."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not _is_ours(tensors):
        return _unhandled(operator, args, kwargs)
    if torch.Tag.inplace_view in operator.tags:
        return _changed_in_place(operator, args, kwargs)
    return run_operator(operator, args, kwargs, StateTensor.kind())


def _of_elements(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator of elements; of plain tensors that meet DTensors, each rank takes its part.

    PyTorch would refuse them.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    plain = [x for x in tensors if not isinstance(x, DTensor) and x.ndim]
    if not plain or not _is_ours(tensors):
        return _unhandled(operator, args, kwargs)
    like = next(x for x in tensors if isinstance(x, DTensor))
    is_partial = any(placement.is_partial() for placement in like.placements)
    if is_partial or not all(_expands(x, like) for x in plain):
        return _by_rule(operator, args, kwargs)
    mesh, layout = like.device_mesh, Placed.of(like).layout
    check_plain(operator, plain, mesh)
    numbers = set(map(id, plain))
    placed = [
        placed_as(x.expand(like.shape), mesh, layout) if id(x) in numbers else x for x in leaves
    ]
    args, kwargs = pytree.tree_unflatten(placed, spec)
    return _unhandled(operator, args, kwargs)


def _expands(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if a tensor can be expanded to the shape of another one."""
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return one.ndim <= other.ndim and all(n in (1, m) for n, m in pairs)


def _changed_in_place(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that changes the shape of its argument, such as `t_`."""
    target = args[0]
    packet = getattr(_ATEN, operator.overloadpacket.__name__.removesuffix("_"), None)
    plain = getattr(packet, overload_name(operator), None)
    if plain is None or origin_of(target) is not None:
        return _unhandled(operator, args, kwargs)
    _set_data(target, run_operator(plain, args, kwargs, StateTensor.kind()))
    return target


def _is_ours(tensors: Sequence[torch.Tensor]) -> bool:
    """True for tensors of planned models that are computed now, and may be combined."""
    shared = (x for x in tensors if isinstance(x, DTensor))
    is_foreign = any(x.device_mesh not in PLANNED_MESHES or stored_shard(x).is_meta for x in shared)
    return not is_foreign and not torch.compiler.is_compiling() and _may_mix(tensors)


def _may_mix(tensors: Sequence[torch.Tensor]) -> bool:
    """False if a plain tensor among DTensors would get the gradient of a DTensor."""
    plain = (x for x in tensors if not isinstance(x, DTensor))
    return not any(x.ndim and x.requires_grad and torch.is_grad_enabled() for x in plain)


_TORCHS: dict[Any, Any] = dict(operator_handlers())
"""The handlers of PyTorch itself."""


def _unhandled(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator as PyTorch would."""
    handlers = operator_handlers()
    if operator in _TORCHS:
        return _TORCHS[operator](operator, args, kwargs)
    handler = handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = handler


def _unscale(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
    """Skip a step of `torch.amp.GradScaler` on all ranks if any has infinite gradients.

    DTensor reduces the flag over the axes that shard the first gradient only; here over the axes
    that shard any gradient.
    """
    gradients, found, scale = args
    _UNSCALE([local_tensor(gradient) for gradient in gradients], *map(local_tensor, (found, scale)))
    # All ranks have the gradients in the same order.
    groups = dict.fromkeys(
        gradient.device_mesh.get_group(axis)
        for gradient in gradients
        if isinstance(gradient, DTensor)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )
    for find in FURTHER_GROUPS:
        groups.update(dict.fromkeys(find(gradients)))
    for group in groups:
        dist.all_reduce(local_tensor(found), dist.ReduceOp.MAX, group)


def _number(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Any:
    """The number of `item()`, `float()` or `bool()`, the same on all ranks."""
    (tensor,) = args
    with torch.no_grad():
        return full_tensor(tensor).item()


def _norms(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Norms of many gradients, as `clip_grad_norm_` takes them: one exchange for all alike."""
    tensors, *rest = args
    placed = {n: Placed.of(x) for n, x in enumerate(tensors) if isinstance(x, DTensor)}
    own = [placed[n].local if n in placed else x for n, x in enumerate(tensors)]
    norms = list(operator(own, *rest, **kwargs))
    order = rest[0] if rest else kwargs.get("ord", 2)
    alike: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[int]] = {}
    for n, part in placed.items():
        axes = tuple(axis for axis, t in enumerate(part.layout.types) if t.is_shard)
        alike.setdefault((part.mesh, axes, norms[n].dtype), []).append(n)
    for (mesh, axes, _), numbers in alike.items():
        stacked = torch.stack([norms[n] for n in numbers])
        for n, whole in zip(numbers, _norm_over_ranks(stacked, order, mesh, axes), strict=True):
            norms[n] = from_local(whole, mesh, [Replicate()] * mesh.ndim, ())
    return norms


def _norm_over_ranks(
    own: torch.Tensor, order: float, mesh: DeviceMesh, axes: Sequence[int]
) -> torch.Tensor:
    """Norms of tensors from the norms of their shards on the ranks of some axes."""
    for axis in axes:
        group = mesh.get_group(axis)
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group)
        own = torch.linalg.vector_norm(torch.stack(parts), order, dim=0)
    return own


def _of_lists(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator of elements of many tensors on shards, which are placed alike.

    Plain tensors may be among them, as an optimizer of planned and of other parameters has.

    Raises:
        PlanError: a parameter and its gradient are placed differently.
    """
    lists = [one for one in args if isinstance(one, list | tuple) and one]
    for tensors in zip(*lists, strict=True):
        placements = {x.placements for x in tensors if isinstance(x, DTensor)}
        if len(placements) > 1:
            raise PlanError(
                f"{operator}: a parameter and its gradient are placed {placements}; "
                f"redistribute the gradient, or pass foreach=False, fused=False to the optimizer"
            )
    given = pytree.tree_map(local_tensor, args), pytree.tree_map(local_tensor, dict(kwargs))
    results = operator(*given[0], **given[1])
    if results is None:
        return None
    return [
        from_local(x, like.device_mesh, like.placements, like.shape)
        if isinstance(like, DTensor)
        else x
        for x, like in zip(results, lists[0], strict=True)
    ]


def _random(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Draw the full tensor on the CPU, and keep this rank's shard of it.

    On a GPU DTensor itself shards the random numbers; on the CPU every shard would have the same.
    """
    target, *rest = args
    if target.device_mesh.device_type != "cpu":
        return _unhandled(operator, args, kwargs)
    full = torch.empty(target.shape, dtype=target.dtype)
    with drawn_alike(target.device_mesh, _DRAWN_DIFFERENTLY):
        drawn = operator(full, *rest, **kwargs)
    result: Any = target if drawn is full else torch.empty_like(target)
    store(drawn, result, StateTensor.kind())
    return result


def _fill(_operator: object, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Any:
    """Fill with a number, as `w[0] = 3.0` does; until PyTorch 2.14 it is a scalar tensor."""
    target, value = args
    _check_whole(target)
    number = full_tensor(value).item() if isinstance(value, torch.Tensor) else value
    local_tensor(target).fill_(number)
    if origin_of(target) is not None:
        store(Placed.of(target).full(), target, StateTensor.kind())
    return target


def _check_whole(target: DTensor) -> None:
    """Refuse to write into a sum that is not computed yet."""
    if any(placement.is_partial() for placement in target.placements):
        raise PlanError(
            f"a DTensor that is placed {target.placements} cannot be written into: redistribute it"
        )


def _copy(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Copy; also a plain tensor, which is whole, and into views, as `w[0] = w[1]` does."""
    target, source = args[:2]
    if is_replaced(target):
        take_shard(target, source)
        return target
    same = isinstance(source, DTensor) and source.placements == target.placements
    if origin_of(target) is None and same and source.shape == target.shape:
        return _unhandled(operator, args, kwargs)
    if not _may_mix([target, source]) or target.device_mesh not in PLANNED_MESHES:
        return _unhandled(operator, args, kwargs)
    _check_whole(target)
    whole = full_tensor(source).to(target.dtype).expand(target.shape)
    store(whole, target, StateTensor.kind())
    return target


_DATA: Any = torch.Tensor.data


def _set_data(self: DTensor, value: torch.Tensor) -> None:
    """Assign `tensor.data`: torch replaces the shape and dtype of a DTensor, but not the shard."""
    _DATA.__set__(self, value)
    if isinstance(value, DTensor):
        take_shard(self, value)


_DEEPCOPY: Any = torch.Tensor.__deepcopy__


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """Deep copy, also of tensors that share memory, as in a bucket; a parameter's has no gradient.

    PyTorch copies plain parameters without their gradients, and DTensors with them; and it takes
    the offset of a shard for the address of memory of the DTensor's own.
    """
    is_parameter = isinstance(self, nn.Parameter)
    if id(self) in memo or not self.is_leaf or not (is_parameter or self.storage_offset()):
        return _DEEPCOPY(self, memo)
    copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    if not is_parameter:
        copied.grad = deepcopy(self.grad, memo)
    vars(copied).update(deepcopy(vars(self), memo))
    return copied
