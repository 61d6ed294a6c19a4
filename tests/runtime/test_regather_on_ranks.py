"""Re-gathering in backward on two ranks: number of gathers, readers, and lifetime."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from support.comparison import check_training, close, device_mesh
from support.hand_plans import HandPlan, cpu_mesh
from support.live_memory import LiveMemory
from support.recomputation import edited
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.errors import PlanError
from autoshard.graph import graph_from_json
from autoshard.lowering.recompute import recomputed
from autoshard.plan import Checkpoint, Plan
from autoshard.runtime import local, parallelize, record_collectives, summarize
from autoshard.runtime.parallelize import planned_forward
from autoshard.runtime.program.instructions import Recompute, RunOperator

NUM_RANKS = 2


class Heads(nn.Module):
    """Three products read one tensor, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return (self.q(h) * self.k(h) * self.v(h).transpose(0, 1)).square().mean()


UP, TANH, Q, K, MUL, V, TRANSPOSE, MERGE, SQUARE, MEAN = range(10)


def heads() -> tuple[Heads, torch.Tensor]:
    torch.manual_seed(1)
    return Heads(), torch.randn(4, 4, 8, requires_grad=True)


def sequence_parallel(**update: Any) -> HandPlan:
    """The sequence is cut before the products, and the features behind them."""
    model, x = heads()
    products = {number: (["R", "S(0)"], ["S(2)"]) for number in (Q, K, V)}
    hand = HandPlan(
        model,
        (x,),
        cpu_mesh(tp=2),
        at_rest={"x": "S(1)", "q.weight": "S(0)", "k.weight": "S(0)", "v.weight": "S(0)"},
        nodes={
            UP: (["S(1)", "R"], ["S(1)"]),
            TANH: (["S(1)"], ["S(1)"]),
            **products,
            MUL: (["S(2)", "S(2)"], ["S(2)"]),
            TRANSPOSE: (["S(2)"], ["S(2)"]),
            MERGE: (["S(2)", "S(2)"], ["S(2)"]),
            SQUARE: (["S(2)"], ["S(2)"]),
            MEAN: (["S(2)"], ["P"]),
        },
        shared={"tanh": "R"},
    )
    for name, value in update.items():
        setattr(hand, name, value)
    return hand


def again(plan: Plan, *values: str) -> Plan:
    reshardings = plan.stages[0].reshardings
    return edited(
        plan,
        reshardings=tuple(
            c.model_copy(update={"regather": c.value in values}) for c in reshardings
        ),
    )


def checkpoint(plan: Plan, first: int, last: int) -> Plan:
    nodes = plan.stages[0].nodes
    return edited(plan, checkpoints=(Checkpoint(first=nodes[first].name, last=nodes[last].name),))


def regathered() -> Plan:
    """One gathered tensor for three readers."""
    return again(sequence_parallel().build(), "tanh")


def chained() -> Plan:
    """A resharding for all that is again, and behind it one for each that is again."""
    return again(sequence_parallel(shared={"tanh": "S(2)"}).build(), "tanh")


def seen_through_a_view() -> Plan:
    """What is saved is the transpose of a resharded tensor."""
    hand = sequence_parallel()
    hand.nodes = {
        **hand.nodes,
        TRANSPOSE: (["R"], ["R"]),
        MERGE: (["R", "R"], ["R"]),
        SQUARE: (["I"], ["I"]),
        MEAN: (["I"], ["I"]),
    }
    return again(hand.build(), "linear_3")


def fully_sharded() -> Plan:
    """Whole parameters are made anew in backward."""
    hand = sequence_parallel(shared={})
    cut = {number: (["S(1)", "R"], ["S(1)"]) for number in (UP, Q, K, V)}
    same = {number: (["S(1)"], ["S(1)"]) for number in (TANH, SQUARE)}
    hand.at_rest = {"x": "S(1)", **{f"{n}.weight": "S(0)" for n in ("up", "q", "k", "v")}}
    hand.nodes = {
        **cut,
        **same,
        MUL: (["S(1)", "S(1)"], ["S(1)"]),
        TRANSPOSE: (["S(1)"], ["S(0)"]),
        MERGE: (["S(1)", "S(1)"], ["S(1)"]),
        MEAN: (["S(1)"], ["P"]),
    }
    plan = hand.build()
    return again(plan, *(p.name for p in plan.stages[0].parameters))


def recomputed_from_what_is_resharded_again() -> Plan:
    """A checkpoint whose input is gathered before it, and again when it is recomputed."""
    return checkpoint(regathered(), Q, MERGE)


def resharded_inside() -> Plan:
    """A checkpoint that makes, gathers and reads a tensor."""
    return checkpoint(sequence_parallel().build(), UP, V)


def resharded_behind() -> Plan:
    """A checkpoint that makes a tensor which is gathered behind it."""
    return checkpoint(again(sequence_parallel().build(), "tanh"), UP, TANH)


PLANS = {
    plan.__name__: cache(plan)
    for plan in (
        regathered,
        chained,
        seen_through_a_view,
        fully_sharded,
        recomputed_from_what_is_resharded_again,
        resharded_inside,
        resharded_behind,
    )
}


def prepared(plan: Plan) -> tuple[nn.Module, DTensor, DeviceMesh]:
    """The planned model, and the input as it is sharded, so that it has a gradient."""
    model, x = heads()
    mesh = device_mesh(plan)
    sharded = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    return parallelize(model, plan, mesh), sharded, mesh


@contextmanager
def no_collection() -> Iterator[None]:
    """What is freed inside is freed by reference counts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_a_step(plan: Plan) -> None:
    model, x = heads()
    check_training(model, plan, (x.detach(),))


def check_a_second_backward(plan: Plan) -> None:
    """Each pass over a graph that is retained makes everything anew."""
    planned, x, mesh = prepared(plan)
    with record_collectives(mesh) as forward:
        loss = planned(x)
    passes = []
    for retain in (True, False):
        with record_collectives(mesh) as recorder:
            loss.backward(retain_graph=retain)
        passes.append(recorder.records)
    assert passes[0] == passes[1]
    assert summarize(forward.records + passes[0]) == plan.collectives
    reference, x = heads()
    (2 * reference(x)).backward()
    for name, parameter in reference.named_parameters():
        close(planned.get_parameter(name).grad.full_tensor(), parameter.grad, name)


def check_a_part_of_backward(plan: Plan) -> None:
    """Readers that have no turn keep nothing alive beyond the graph."""
    planned, x, _ = prepared(plan)
    reference, full = heads()
    live = LiveMemory()
    with no_collection():
        with live:
            loss = planned(x)
            (gradient,) = torch.autograd.grad(loss, [planned.k.weight])
        expected = torch.autograd.grad(reference(full), [reference.k.weight])[0]
        close(gradient.full_tensor(), expected, "k.weight")
        del loss, gradient
        assert live.falls_to(0)


def check_forward_alone(plan: Plan) -> None:
    """A forward without backward leaves nothing behind, however it ends."""
    planned, x, _ = prepared(plan)
    live = LiveMemory()
    with no_collection():
        with live, torch.no_grad():
            planned(x)
        assert live.falls_to(0)
        with live:
            planned(x)
        assert live.falls_to(0)
        with live, pytest.raises(Interruption), Interrupting():
            planned(x)
        assert live.falls_to(0)
    check_a_second_backward(plan)


class Interruption(Exception):  # noqa: N818  no error
    """Ends a step."""


class Interrupting(TorchDispatchMode):
    """Ends a step when it squares."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.pow.Tensor_Scalar:
            raise Interruption
        return func(*args, **(kwargs or {}))


def check_memory_is_freed(plan: Plan) -> None:
    """Backward leaves gradients only."""
    planned, x, _ = prepared(plan)
    live = LiveMemory()
    with no_collection():
        with live:
            planned(x).backward()
        gradients = [p.grad.to_local() for p in (x, *planned.parameters())]
        assert live.falls_to(sum(gradient.nbytes for gradient in gradients))


def check_change_in_place(plan: Plan) -> None:
    """What is written into an argument after forward is an error, or changes no gradient."""
    planned, x, _ = prepared(plan)
    mine = x.to_local().detach().clone()
    loss = planned(local(mine, like=x))
    mine.add_(1)
    with pytest.raises(PlanError, match="changed in place after forward"):
        loss.backward()
    gradients = []
    for change in (0, 1):
        for given in (x.full_tensor().detach().clone(), x.detach().clone()):
            planned.zero_grad()
            loss = planned(given)
            given.add_(change)
            loss.backward()
            gradients.append([p.grad.full_tensor() for p in planned.parameters()])
    for other in gradients[1:]:
        assert all(map(torch.equal, gradients[0], other))


def check_what_runs_again(plan: Plan) -> None:
    """The calls before the last one that saves something, which begins if it saves inputs."""
    planned, x, _ = prepared(plan)
    stage = plan.stages[0]
    began: list[str] = []
    for instruction in planned_forward(planned).program.instructions:
        if isinstance(instruction, Recompute):
            for call in instruction.instructions:
                if isinstance(call, RunOperator):
                    call.kernel = logging(call, began)
    loss = planned(x)
    began.clear()
    loss.backward()
    nodes = [node.name for node in stage.nodes]
    first, last = (nodes.index(name) for name in (stage.checkpoints[0].first, began[-1]))
    assert began == nodes[first : last + 1]
    found = recomputed(graph_from_json(stage.program), stage).nodes
    assert found == {*nodes[first:last], *(["tanh"] if nodes[last] == "tanh" else [])}
    assert nodes[last] == stage.checkpoints[0].last


def logging(call: RunOperator, began: list[str]) -> Callable[..., tuple[torch.Tensor, ...]]:
    kernel = call.kernel

    def run(tensors: Any, step: int) -> tuple[torch.Tensor, ...]:
        began.append(call.node)
        return kernel(tensors, step)

    return run


@dataclass
class Case:
    """A check of a plan, which is made before there are ranks."""

    plan: str
    check: Callable[[Plan], None]

    def prepare(self) -> None:
        PLANS[self.plan]()

    def __call__(self) -> None:
        self.check(PLANS[self.plan]())


CHECKS = (
    check_a_step,
    check_a_second_backward,
    check_a_part_of_backward,
    check_forward_alone,
    check_memory_is_freed,
)
CHECKPOINTED = ("recomputed_from_what_is_resharded_again", "resharded_inside", "resharded_behind")
CASES = {
    f"{plan}, {check.__name__.removeprefix('check_')}": Case(plan, check)
    for plan in PLANS
    for check in CHECKS
} | {
    "fully_sharded, change_in_place": Case("fully_sharded", check_change_in_place),
    **{f"{plan}, what_runs_again": Case(plan, check_what_runs_again) for plan in CHECKPOINTED},
}


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_regather(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
