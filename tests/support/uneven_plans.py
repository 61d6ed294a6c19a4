"""Plans by hand for a net whose sizes the axes do not divide, and what is checked of them."""

import copy
from functools import partial

import pytest
import torch
from support import two_layers
from support.comparison import check_training, close, device_mesh, whole
from support.hand_plans import HandPlan
from support.recomputation import edited
from support.two_layers import Net
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.runtime import parallelize

NUM_RANKS = 4
EXACT = 1e-10


def net(batch: int = 10, length: int = 10, hidden: int = 18) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return Net(7, hidden).double(), torch.randn(batch, length, 7, dtype=torch.float64)


def data_parallel(at_rest: dict[str, str] | None = None) -> HandPlan:
    """A batch of 10 on 4 ranks: R -> S, and gradients reduced over ranks with other shares."""
    return two_layers.batch_cut(net(), at_rest or {}, dp=4)


def fully_sharded() -> HandPlan:
    """S -> R: 18 and 7 rows, 18 columns at rest on 4 ranks."""
    at_rest = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)", "down.bias": "S(0)"}
    return data_parallel(at_rest)


def whole_batch() -> HandPlan:
    """R -> S: every rank reads the whole batch."""
    return data_parallel({"x": "R"})


def moved_shards() -> HandPlan:
    """S(a) -> S(b), both uneven, and one of them even."""
    return two_layers.moved_shards(net(), {"x": "S(2)"})


def sequence_parallel() -> HandPlan:
    """S -> R and P -> S of a length of 10 around 18 hidden features."""
    return two_layers.sequence_parallel(net())


def whole_at_rest() -> HandPlan:
    """I -> S: weights of which a rank uses its rows."""
    plan = sequence_parallel()
    plan.at_rest = {"x": "S(1)"}
    return plan


def megatron(batch: int, hidden: int) -> HandPlan:
    """Column- then row-parallel over tp, batch over dp."""
    return two_layers.megatron(net(batch, hidden=hidden), down="S(0),S(1)")


HAND = {
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    "whole batch": whole_batch,
    "moved shards": moved_shards,
    "sequence parallel": sequence_parallel,
    "whole at rest": whole_at_rest,
    "uneven features, even batch": partial(megatron, 4, 17),
    "even features, uneven batch": partial(megatron, 5, 18),
    "uneven features, uneven batch": partial(megatron, 5, 17),
}


def check_hand_plan(hand: HandPlan, plan: Plan) -> None:
    model = copy.deepcopy(hand.model)
    check_training(model, plan, hand.args, tolerance=EXACT)


def check_gathered_again(hand: HandPlan, plan: Plan) -> None:
    """Backward gathers 18 columns once more instead of finding them held."""
    (stage,) = plan.stages
    (weight,) = (p.name for p in stage.parameters if p.target == "down.weight")
    reshardings = (c.model_copy(update={"regather": c.value == weight}) for c in stage.reshardings)
    again = edited(plan, reshardings=tuple(reshardings))
    assert again.collectives != plan.collectives
    check_training(copy.deepcopy(hand.model), again, hand.args, tolerance=EXACT)


def check_rests(_hand: HandPlan, plan: Plan) -> None:
    """Parameters are what DTensor itself makes of them, in shards and in state dicts."""
    reference, _ = net()
    model, _ = net()
    mesh = device_mesh(plan)
    state = parallelize(model, plan, mesh).state_dict()
    for name, parameter in reference.named_parameters():
        distributed = distribute_tensor(parameter.detach(), mesh, state[name].placements)
        assert torch.equal(state[name].to_local(), distributed.to_local()), name
        assert torch.equal(whole(state[name]), parameter), name
    mine = [5, 5, 5, 3][mesh.get_local_rank()]
    assert state["up.weight"].to_local().shape == (mine, 7)
    assert state["down.weight"].to_local().shape == (7, mine)


def check_arguments(_hand: HandPlan, plan: Plan) -> None:
    """The whole batch and a DTensor of each rank's rows are the same input."""
    model, x = net()
    mesh = device_mesh(plan)
    planned = parallelize(model, plan, mesh, other_shapes="error")
    rank = mesh.get_local_rank()
    mine = x.chunk(NUM_RANKS)[rank]
    placements = planned(x)[1].placements
    own = DTensor.from_local(mine, mesh, placements, shape=x.shape, stride=x.stride())
    for given in (own, distribute_tensor(x, mesh, placements)):
        loss, y = planned(given)
        assert loss == planned(x)[0]
        assert isinstance(y, DTensor)
        assert y.shape == x.shape
        assert y.detach().to_local().shape == mine.shape
        close(whole(y.detach()), Net.forward(net()[0], x)[1].detach(), "output", EXACT)
    other = x[:3] if rank == NUM_RANKS - 1 else x[:1]
    for given in (other, mine):
        with pytest.raises(PlanError, match=r"the plan is for the global shape \(10, 10, 7\)"):
            planned(given)
