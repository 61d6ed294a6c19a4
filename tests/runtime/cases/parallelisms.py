"""Well-known ways to train a model in parallel, as plans written by hand, on real ranks."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from support import two_layers
from support.comparison import check_inference, check_training, close, device_mesh, whole
from support.devices import DEVICE
from support.hand_plans import HandPlan
from support.two_layers import MEAN, POW, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.runtime import parallelize


def net() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(1)
    return Net(8, 16), torch.randn(4, 8, 8)


def megatron() -> HandPlan:
    return two_layers.megatron(net())


def sequence_parallel() -> HandPlan:
    return two_layers.sequence_parallel(net())


def batch_cut(at_rest: dict[str, str], **axes: int) -> HandPlan:
    return two_layers.batch_cut(net(), at_rest, **axes)


def data_parallel() -> HandPlan:
    return batch_cut({}, dp=4)


def fully_sharded() -> HandPlan:
    return batch_cut({"up.weight": "S(0)", "down.weight": "S(1)", "up.bias": "S(0)"}, dp=4)


def fully_sharded_over_two_axes() -> HandPlan:
    """Both nesting orders of a dim that two axes cut."""
    return batch_cut(
        {"up.weight": "S(0),S(0);1>0", "down.weight": "S(0),S(0)", "up.bias": "S(0),S(0);1>0"},
        a=2,
        b=2,
    )


def axis_of_one_rank() -> HandPlan:
    return batch_cut({"up.weight": "S(0),S(0)", "down.weight": "S(0),I"}, a=1, b=4)


def sharded_tensor_parallel() -> HandPlan:
    """Megatron whose weights are cut over dp as well, inside tp's cut: `_StridedShard`."""
    plan = megatron()
    weights = {
        "up.weight": "S(0),S(0);1>0",
        "up.bias": "S(0),S(0);1>0",
        "down.weight": "S(0),S(1)",
        "down.bias": "S(0),I",
    }
    plan.at_rest = {**plan.at_rest, **weights}
    return plan


def moved_shards() -> HandPlan:
    return two_layers.moved_shards(net(), {"x": "S(1)"})


def megatron_inference() -> HandPlan:
    """Without gradients I and R are one type."""
    hand = megatron()
    hand.mode = "inference"
    hand.at_rest = {
        "x": "S(0),R",
        "up.weight": "R,S(0)",
        "up.bias": "R,S(0)",
        "down.weight": "R,S(1)",
    }
    hand.nodes = {
        **hand.nodes,
        POW: (["S(0),R"], ["S(0),R"]),
        MEAN: (["S(0),R"], ["P,R"]),
    }
    hand.shared = {"linear_1": "S(0),R"}
    hand.outputs = {}
    return hand


PLANS = {
    "megatron": megatron,
    "sequence parallel": sequence_parallel,
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    "fully sharded over two axes": fully_sharded_over_two_axes,
    "an axis of one rank": axis_of_one_rank,
    "sharded tensor parallel": sharded_tensor_parallel,
    "moved shards": moved_shards,
    "inference": megatron_inference,
}


@cache
def built(name: str) -> Plan:
    return PLANS[name]().build()


@dataclass
class Case:
    """A check that needs a plan, which is made before there are ranks."""

    plan: str
    check: Callable[[Plan], None]

    def prepare(self) -> None:
        built(self.plan)

    def __call__(self) -> None:
        self.check(built(self.plan))


def check_a_step(plan: Plan) -> None:
    model, x = net()
    check_training(model, plan, (x,))


def check_steps_of_an_optimizer(plan: Plan) -> None:
    """Any optimizer of torch trains the sharded parameters as it trains whole ones."""
    reference, _ = net()
    planned = parallelize(net()[0], plan, device_mesh(plan))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (reference, planned)]
    for step in range(3):
        x = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip((reference, planned), optimizers, strict=True):
            optimizer.zero_grad()
            model(x)[0].backward()
            optimizer.step()
    trained = planned.state_dict()
    for name, parameter in reference.named_parameters():
        close(trained[name].full_tensor(), parameter.detach(), name)


def check_inputs(plan: Plan) -> None:
    """The whole batch and a DTensor of each rank's slice are the same input."""
    model, x = net()
    mesh = device_mesh(plan)
    planned = parallelize(model, plan, mesh, other_shapes="error")
    (placed,) = (i for i in plan.stages[0].inputs if i.kind == "user")
    row, _ = mesh.get_coordinate()
    mine = x[2 * row : 2 * row + 2]
    distributed = DTensor.from_local(mine, mesh, [*planned(x)[1].placements])
    losses = [planned(given)[0].detach() for given in (x, distributed)]
    assert losses[0] == losses[1]
    for other in (torch.randn(3, 8, 8), mine):
        with pytest.raises(PlanError, match=r"the plan is for the global shape \(4, 8, 8\)"):
            planned(other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is moved
        moved = distributed.redistribute(placements=[*planned.down.bias.placements])
        assert planned(moved)[0].detach() == losses[0]
    with pytest.raises(PlanError, match="float64"):
        planned(x.double())
    with pytest.raises(PlanError, match="requires a gradient"):
        planned(x.clone().requires_grad_())
    assert planned(x=x)[0].detach() == losses[0]
    with pytest.raises(PlanError, match=r"exported as forward\(\*\), and called as forward\(z="):
        planned(z=x)
    assert placed.local_shape == (2, 8, 8)


def check_outputs(plan: Plan) -> None:
    """A cut result is a DTensor through which gradients flow; a whole one is plain."""
    reference, x = net()
    planned = parallelize(net()[0], plan, device_mesh(plan))
    loss, y = planned(x)
    assert not isinstance(loss, DTensor)
    assert isinstance(y, DTensor)
    y.sum().backward()
    reference(x)[1].sum().backward()
    assert planned.up.weight.grad is not None
    for name, parameter in reference.named_parameters():
        close(whole(planned.get_parameter(name).grad), parameter.grad, name)


def check_inference_plan(plan: Plan) -> None:
    model, x = net()
    check_inference(model, plan, (x,))


def check_mesh_that_does_not_fit(plan: Plan) -> None:
    model, _ = net()
    other = init_device_mesh(DEVICE, (4,), mesh_dim_names=("dp",))
    with pytest.raises(PlanError, match=r"mesh with the axes dp=2, tp=2; .* init_device_mesh"):
        parallelize(model, plan, other)


def check_model_that_does_not_fit(plan: Plan) -> None:
    """The error names the differences, and the model is as it was."""
    mesh = device_mesh(plan)
    model, _ = net()
    model.up = nn.Linear(8, 32)
    model.extra = nn.Parameter(torch.zeros(1))
    model.down.weight = nn.Parameter(model.down.weight.detach().double())
    del model.down.bias
    with pytest.raises(PlanError) as raised:
        parallelize(model, plan, mesh)
    message = str(raised.value)
    for difference in (
        "'up.weight' has shape (32, 8), but (16, 8) in the plan",
        "'down.weight' is torch.float64, but float32 in the plan",
        "the model has no parameter 'down.bias'",
        "the plan has no parameter 'extra'",
    ):
        assert difference in message
    assert type(model) is Net
    assert not any(isinstance(p, DTensor) for p in model.parameters())


CASES: dict[str, Case] = {
    **{name: Case(name, check_a_step) for name in PLANS if name != "inference"},
    "inference": Case("inference", check_inference_plan),
    "an optimizer": Case("sharded tensor parallel", check_steps_of_an_optimizer),
    "inputs": Case("megatron", check_inputs),
    "outputs": Case("megatron", check_outputs),
    "another mesh": Case("megatron", check_mesh_that_does_not_fit),
    "another model": Case("megatron", check_model_that_does_not_fit),
}
