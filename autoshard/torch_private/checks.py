"""Checks of private parts: each is tried on small tensors, and does what its docstring says.

A part that another torch does not have is an error by itself. These are the parts of which another
torch may have the name, but not what it did: the model would compute other numbers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import P2POp, ProcessGroup, _state_dict_utils
from torch.distributed.checkpoint import planner_helpers, state_dict, utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.overrides import TorchFunctionMode
from torch.utils.data import RandomSampler

from autoshard.torch_private.distributed import replace_total_norm, torch_total_norm
from autoshard.torch_private.dtensors import (
    DeferredShard,
    dtensor_of,
    operator_handlers,
    spec_of,
    stored_shard,
    strided_shard,
    take_shard,
)
from autoshard.torch_private.pipelining import StageBase, num_micro_batches, without_set_up
from autoshard.torch_private.tensors import (
    accumulates,
    checkpointed,
    given_num_samples,
    has_gradient_hooks,
    is_transformed,
    own_parameters,
    reads_autograd,
    runs_backward,
    saves_result,
    schema_of,
    shares_memory,
    version_counter,
    without_torch_function,
)
from autoshard.torch_private.versions import Check


def checks_of_tensors() -> Mapping[str, Check]:
    """Checks of torch itself, by what they check."""
    return {
        "in-place operators increase a tensor's version": _counts_writes,
        "a backward pass has a number": _numbers_backward,
        "backward tells leaves that accumulate from those of autograd.grad": _tells_leaves,
        "hooks of a gradient are seen": _sees_hooks,
        "what a checkpoint recomputes can be changed": _changes_recomputation,
        "modes see reads of autograd's attributes": _sees_autograd,
        "transforms of torch.func are seen": _sees_transforms,
        "functions of subclasses can be left out": _leaves_out_functions,
        "nodes of autograd tell whether they save their result": _tells_saved_results,
        "views share the storage of their tensor": _compares_storages,
        "operators have a schema": _has_schemas,
        "modules keep their parameters by name": _keeps_parameters,
        "samplers keep the number that they were given": _keeps_numbers,
        "clip_grad_norm_ computes the norm by a function that can be replaced": _replaces_norms,
        "state dicts are filled by a function that can be replaced": _replaces_filling,
        "state dicts are made by functions that can be replaced": _replaces_making,
        "distributed checkpoints ask a DTensor for its slices": _asks_for_slices,
    }


def checks_of_dtensors(mesh: DeviceMesh) -> Mapping[str, Check]:
    """Checks of DTensor, by what they check.

    Args:
        mesh: of any ranks; they do not communicate.
    """
    return {
        "DTensor calls the handler of an operator": partial(_calls_handlers, mesh),
        "a DTensor is a shard and a specification": partial(_keeps_shards, mesh),
        "the shard of a DTensor can be computed when it is read": partial(_defers_shards, mesh),
        "_StridedShard interleaves": _interleaves,
    }


def checks_of_pipelines(group: ProcessGroup) -> Mapping[str, Check]:
    """Checks of the schedules of pipelines, by what they check.

    Args:
        group: of any ranks, as above.
    """
    return {"schedules run stages of others, without setting them up": partial(_runs_stages, group)}


def _counts_writes() -> bool:
    tensor = torch.zeros(2)
    before = version_counter(tensor)
    tensor[0] = 1
    return version_counter(tensor) > before


def _tells_saved_results() -> bool:
    leaf = torch.ones(2, 2, requires_grad=True)
    results = (leaf.tanh(), leaf.exp().t(), leaf.softmax(0), leaf * 2, leaf @ leaf, leaf.sum(0))
    return [saves_result(x.grad_fn) for x in results] == [True, True, True, False, False, False]


def _numbers_backward() -> bool:
    seen: list[bool] = []
    result = 2 * torch.zeros((), requires_grad=True)
    result.register_hook(lambda _: seen.append(runs_backward()))  # type: ignore[no-untyped-call]  # torch
    torch.autograd.backward([result])
    return seen == [True] and not runs_backward()


def _tells_leaves() -> bool:
    seen: list[bool] = []
    leaf = torch.zeros((), requires_grad=True)
    result = 2 * leaf
    assert result.grad_fn is not None
    accumulator = next(node for node, _ in result.grad_fn.next_functions if node is not None)
    result.register_hook(lambda _: seen.append(accumulates(accumulator)))  # type: ignore[no-untyped-call]  # torch
    torch.autograd.backward([result], retain_graph=True)
    torch.autograd.grad(result, leaf)
    return seen == [True, False]


def _sees_hooks() -> bool:
    def nothing(_: torch.Tensor) -> None:
        pass

    none, before, after = (torch.zeros((), requires_grad=True) for _ in range(3))
    before.register_hook(nothing)  # type: ignore[no-untyped-call]  # torch
    after.register_post_accumulate_grad_hook(nothing)  # type: ignore[no-untyped-call]  # torch
    return [has_gradient_hooks(leaf) for leaf in (none, before, after)] == [False, True, True]


def _changes_recomputation() -> bool:
    seen: list[bool] = []

    def change(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            seen.append(runs_backward())
            return function(*args)

        return changed

    leaf = torch.zeros((), requires_grad=True)
    for use_reentrant in (True, False):
        with checkpointed(change):
            result = torch.utils.checkpoint.checkpoint(torch.sin, leaf, use_reentrant=use_reentrant)
        torch.autograd.backward([result])
    return seen == [False, True, True]


class _AutogradReads(TorchFunctionMode):
    """Counts the functions that read attributes of autograd."""

    count = 0

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += reads_autograd(func)
        return func(*args, **(kwargs or {}))


def _sees_autograd() -> bool:
    tensor = torch.zeros(2)
    with _AutogradReads() as reads:
        _ = tensor.shape, tensor.sum()
        before = reads.count
        _ = tensor.grad_fn, tensor._version, tensor._base, tensor._is_view()
    return (before, reads.count) == (0, 4)


def _sees_transforms() -> bool:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed())
        return x

    torch.func.vmap(function)(torch.zeros(1))
    return seen == [True] and not is_transformed()


class _Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("called")


def _leaves_out_functions() -> bool:
    tensor = torch.zeros(1).as_subclass(_Refusing)
    with without_torch_function():
        return torch.neg(tensor).ndim == 1


def _compares_storages() -> bool:
    tensor = torch.zeros(2, 2)
    return shares_memory(tensor, tensor.t()[1:]) and not shares_memory(tensor, tensor.clone())


def _has_schemas() -> bool:
    schema = schema_of(torch.ops.aten.add_.Tensor)
    names = [argument.name for argument in schema.arguments]
    return schema.name == "aten::add_" and schema.is_mutable and names == ["self", "other", "alpha"]


def _keeps_parameters() -> bool:
    module = nn.Linear(1, 1, bias=False)
    return own_parameters(module) == {"weight": module.weight, "bias": None}


def _keeps_numbers() -> bool:
    rows = range(3)
    given = (given_num_samples(RandomSampler(rows, num_samples=n)) for n in (None, 2))
    return tuple(given) == (None, 2)


def _replaces_norms() -> bool:
    called: list[object] = []

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        called.append(args)
        return torch_total_norm(*args, **kwargs)

    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.ones(1)
    before = replace_total_norm(norm)
    users: list[Callable[[], object]] = [
        partial(clip_grad_norm_, [leaf], 1.0),
        partial(get_total_norm, [leaf]),
    ]
    try:
        for user in users:
            user()
    finally:
        replace_total_norm(before)
    return len(called) == len(users)


def _replaces_filling() -> bool:
    # Read, since to call it takes all ranks.
    return "_distribute_tensors" in _state_dict_utils._broadcast_tensors.__code__.co_names


def _replaces_making() -> bool:
    names = state_dict.get_state_dict.__code__.co_names
    return {"_get_model_state_dict", "_get_optim_state_dict"} <= {*names}


def _asks_for_slices() -> bool:
    reading = planner_helpers._create_chunk_list.__code__.co_names
    writing = planner_helpers._create_write_items.__code__.co_names
    shard = utils.find_tensor_shard.__code__.co_names
    return (
        "__create_chunk_list__" in reading
        and "__create_write_items__" in writing
        and "__get_tensor_shard__" in shard
        and hasattr(DTensor, "__create_chunk_list__")
    )


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, first: Placement) -> DTensor:
    placements = [first, *[Replicate()] * (mesh.ndim - 1)]
    return DTensor.from_local(local.to(mesh.device_type), mesh, placements, run_check=False)


def _calls_handlers(mesh: DeviceMesh) -> bool:
    handlers, aten = operator_handlers(), torch.ops.aten
    called: list[Any] = []

    def number(operator: Any, _args: Any, _kwargs: Any) -> float:
        called.append(operator)
        return 3.0

    def first(operator: Any, args: Any, _kwargs: Any) -> Any:
        called.append(operator)
        return args[0]

    given: dict[Any, Any] = {
        aten._local_scalar_dense.default: number,
        aten.normal_.default: first,
        aten.copy_.default: first,
    }
    before = {operator: handlers.get(operator) for operator in given}
    tensor = _dtensor(torch.zeros(()), mesh, Replicate())
    handlers.update(given)
    try:
        found = tensor.item()
        tensor.normal_().copy_(tensor)
    finally:
        handlers.update({operator: one for operator, one in before.items() if one is not None})
        for operator in [operator for operator, one in before.items() if one is None]:
            del handlers[operator]
    return found == 3.0 and called == list(given)  # noqa: PLR2004  of the handler


def _keeps_shards(mesh: DeviceMesh) -> bool:
    source = _dtensor(torch.zeros(2, 2), mesh, Shard(1))
    shard = torch.ones(2, 2)
    made = dtensor_of(shard, spec_of(source))
    other = _dtensor(torch.zeros(3), mesh, Replicate())
    take_shard(other, made)
    return (
        made.placements == other.placements == source.placements
        and made.shape == source.shape
        and stored_shard(made) is stored_shard(other) is shard
    )


class _Ones(DeferredShard):
    __slots__ = ()

    def compute_shard(self) -> torch.Tensor:
        return torch.ones(2)


def _defers_shards(mesh: DeviceMesh) -> bool:
    source = _dtensor(torch.zeros(2), mesh, Replicate())
    made = _Ones.deferred(torch.empty(0), spec_of(source))
    leaf = source.detach().requires_grad_()
    leaf.grad = made
    is_pending = isinstance(leaf.grad, _Ones) and leaf.grad.shape == (2,)
    source.add_(made)
    return is_pending and type(made) is DTensor and stored_shard(source).tolist() == [1, 1]


def _interleaves() -> bool:
    placement: Any = strided_shard(0, 2)
    pieces, _ = placement._split_tensor(torch.arange(4), 2, with_padding=False)
    return [piece.tolist() for piece in pieces] == [[0, 2], [1, 3]]


class _RecordingStage(StageBase):
    """A stage that writes down which micro-batches it runs."""

    def __init__(self, group: ProcessGroup) -> None:
        device = torch.device("cpu")
        super().__init__(nn.Identity(), 0, 1, device=device, group=group, position=(0, 1))
        self.forwards: list[int] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Any:
        self.forwards.append(fwd_chunk_id)
        return ()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:  # noqa: ARG002
        return []

    get_fwd_send_ops = get_fwd_recv_ops


def _runs_stages(group: ProcessGroup) -> bool:
    first, second = _RecordingStage(group), _RecordingStage(group)
    both = Schedule1F1B(first, 2), ScheduleInterleaved1F1B([second], 2)
    for schedule in map(without_set_up, both):
        schedule.eval(return_outputs=False)
    counts = {num_micro_batches(schedule) for schedule in both}
    return counts == {2} and first.forwards == second.forwards == [0, 1]
