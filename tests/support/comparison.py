"""A planned model against the same model on one device."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from support.devices import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree

from autoshard.graph import graph_from_json
from autoshard.graph.experts import ragged_values
from autoshard.layouts import Layout
from autoshard.plan import CollectiveCount, Plan
from autoshard.runtime import parallelize, record_collectives, summarize

TOLERANCE = 1e-5


@cache
def mesh_of_ranks(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh on this process group; cases that ask for the same one share its groups."""
    return init_device_mesh(DEVICE, sizes, mesh_dim_names=names)


def device_mesh(plan: Plan) -> DeviceMesh:
    """The mesh that a plan is for, on this process group."""
    return mesh_of_ranks(tuple(plan.mesh.axis_sizes), tuple(plan.mesh.axis_names))


def whole(value: Any) -> Any:
    """A tensor as one device would hold it, on the CPU."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.cpu() if isinstance(full, torch.Tensor) else full


def check_training(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    ignore_state: Collection[str] = (),
    tolerance: float = TOLERANCE,
) -> None:
    """One step: outputs, every gradient, and the collectives are what they should be.

    Gradients enter at the first output: the loss, or a tensor if there is none. Where a dim is
    cut unevenly on one of several axes, a rank with fewer rows sums fewer numbers with those
    that have as many: the plan counts the bytes of the largest, which the first rank has.
    """
    kwargs = kwargs or {}
    reference = copy.deepcopy(model)
    expected = _outputs(reference(*args, **kwargs))
    cotangent = torch.randn_like(expected[0]) if expected[0].ndim else torch.ones_like(expected[0])
    expected[0].backward(cotangent)
    mesh = device_mesh(plan)
    planned = parallelize(
        model,
        plan,
        mesh,
        constants=constants,
        custom_operators=custom_operators,
        ignore_state=ignore_state,
    )
    assert planned is model
    assert isinstance(planned, type(reference))
    with record_collectives(mesh) as recorder:
        outputs = _outputs(planned(*args, **kwargs))
    if isinstance(outputs[0], DTensor):
        cotangent = distribute_tensor(cotangent, mesh, outputs[0].placements)
    cotangent = cotangent.to(outputs[0].device)
    with recorder:
        outputs[0].backward(cotangent)
    _compare_outputs(outputs, expected, tolerance)
    _compare_parameters(planned, reference, tolerance)
    _compare_collectives(summarize(recorder.records), plan, mesh)


def _compare_parameters(planned: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Names, values and gradients are those of the model on one device."""
    names = dict(reference.named_parameters(remove_duplicate=False))
    assert list(names) == [n for n, _ in planned.named_parameters(remove_duplicate=False)]
    assert list(planned.state_dict()) == list(reference.state_dict())
    for name, parameter in planned.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor)
        close(parameter.detach().full_tensor(), names[name].detach(), f"parameter {name}", 0)
        if names[name].grad is None:
            assert parameter.grad is None, name
            continue
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name
        # Fused optimizers look at memory, not at strides.
        assert parameter.grad.to_local().is_contiguous(), name
        close(parameter.grad.full_tensor(), names[name].grad, f"gradient of {name}", tolerance)


def _compare_collectives(found: tuple[CollectiveCount, ...], plan: Plan, mesh: DeviceMesh) -> None:
    """What this rank ran in a step is what the plan counts."""
    if orders_rows(plan):
        found = mean_over_ranks(found)
    if exchanges_edges(plan):
        found = most_over_ranks(found, uneven=shards_unevenly(plan))
    if any(mesh.get_coordinate() or ()) and mesh.ndim > 1 and shards_unevenly(plan):
        for one, planned_one in zip(found, plan.collectives, strict=True):
            assert one.nbytes <= planned_one.nbytes
            assert one.model_copy(update={"nbytes": planned_one.nbytes}) == planned_one
    else:
        check_collectives(found, plan)


def check_collectives(found: Sequence[CollectiveCount], plan: Plan) -> None:
    """Check that a rank ran the collectives that a plan counts; the error lists what differs."""
    differences = sorted(map(str, {*found} ^ {*plan.collectives}))
    assert tuple(found) == plan.collectives, differences


def shards_unevenly(plan: Plan) -> bool:
    """Whether some rank has less of a tensor than another."""
    return any(
        size % layout.num_parts(dim, plan.mesh.axis_sizes) != 0
        for shape, layout in _layouts(plan)
        for dim, size in enumerate(shape)
    )


def _layouts(plan: Plan) -> Iterator[tuple[Sequence[int], Layout]]:
    """Shape and layout of all that is made and of all that is resharded."""
    for stage in plan.stages:
        graph = graph_from_json(stage.program)
        for node, placed in zip(graph.nodes, stage.nodes, strict=True):
            for name, text in zip(node.outputs, placed.outputs, strict=True):
                yield graph.values[name].shape, Layout.parse(text)
        for resharding in stage.reshardings:
            yield graph.values[resharding.value].shape, Layout.parse(resharding.source)
            yield graph.values[resharding.value].shape, Layout.parse(resharding.target)


def orders_rows(plan: Plan) -> bool:
    """Whether how many rows a rank has is data."""
    return any(ragged_values(graph_from_json(stage.program)) for stage in plan.stages)


def mean_over_ranks(found: Sequence[CollectiveCount]) -> tuple[CollectiveCount, ...]:
    """What ranks ran: each as often, and bytes on average, which must be a whole number."""
    every: list[list[CollectiveCount]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, list(found))
    totals = [sum(c.nbytes for c in counts) for counts in zip(*every, strict=True)]
    for counts, total in zip(zip(*every, strict=True), totals, strict=True):
        assert len({c.model_copy(update={"nbytes": 0}) for c in counts}) == 1
        assert total % len(every) == 0
    return tuple(
        c.model_copy(update={"nbytes": total // len(every)})
        for c, total in zip(found, totals, strict=True)
    )


def exchanges_edges(plan: Plan) -> bool:
    """Whether ranks at the ends of an axis have less to send than those between them."""
    return any(c.kind == "halo_exchange" for c in plan.collectives)


def most_over_ranks(
    found: Sequence[CollectiveCount], *, uneven: bool
) -> tuple[CollectiveCount, ...]:
    """What the rank with most bytes ran; all have the same, but of halo exchanges and if uneven."""
    every: list[list[CollectiveCount]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, list(found))
    most = []
    for counts in zip(*every, strict=True):
        largest = max(counts, key=lambda c: c.nbytes)
        for c in counts:
            assert c.model_copy(update={"nbytes": largest.nbytes}) == largest
            assert c.nbytes == largest.nbytes or uneven or c.kind == "halo_exchange"
        most.append(largest)
    return tuple(most)


def check_inference(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    custom_operators: Collection[str] = (),
    ignore_state: Collection[str] = (),
) -> None:
    """One forward: outputs and collectives are what they should be."""
    kwargs = kwargs or {}
    with torch.no_grad():
        expected = _outputs(model(*args, **kwargs))
    mesh = device_mesh(plan)
    planned = parallelize(
        model,
        plan,
        mesh,
        constants=constants,
        custom_operators=custom_operators,
        ignore_state=ignore_state,
    )
    with record_collectives(mesh) as recorder:
        outputs = _outputs(planned(*args, **kwargs))
    assert not any(output.requires_grad for output in outputs)
    _compare_outputs(outputs, expected)
    found = summarize(recorder.records)
    if exchanges_edges(plan):
        found = most_over_ranks(found, uneven=shards_unevenly(plan))
    assert (mean_over_ranks(found) if orders_rows(plan) else found) == plan.collectives


def close(
    actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE
) -> None:
    """Check that a tensor on any device has the numbers that are expected."""
    torch.testing.assert_close(
        *(
            value.cpu() if isinstance(value, torch.Tensor) else value
            for value in (actual, expected)
        ),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {text}",
    )


def _outputs(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _compare_outputs(
    actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    assert len(actual) == len(expected)
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        close(whole(one.detach()), other.detach(), f"output {i}", tolerance)
