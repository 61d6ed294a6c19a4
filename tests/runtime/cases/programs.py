"""What surrounds the operators: buffers, constants, frozen and tied parameters, randomness."""

import json
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from support.comparison import check_inference, check_training, close, device_mesh, whole
from support.hand_plans import Checked, HandPlan, cpu_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.runtime import LocalProgram, parallelize
from autoshard.runtime.program.instructions import ProgramRun, execute
from autoshard.runtime.program.regather import Regathers


class Scaled(nn.Module):
    """A buffer, constants that forward makes, a frozen parameter, a flag and a number.

    Of the constants one is written as a number, which the plan brings along.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("scale", torch.arange(8.0))

    def forward(
        self, x: torch.Tensor, *, shift: float, negate: bool
    ) -> dict[str, torch.Tensor | float]:
        y = x @ self.weight * self.scale * x.new_tensor([2.0, 3.0] * 4) + self.frozen
        y = y * torch.tensor(0.5)
        y = -y if negate else y
        return {"loss": y.pow(2).mean(), "shift": shift, "y": y}


class Tied(nn.Module):
    """A table that is used at both ends under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).logsumexp(-1).mean()


class Summands(nn.Module):
    """Autograd gives both parameters the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ (self.first + self.second)).square().mean()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, training=True)


CONSTANTS = {
    "lifted_tensor_0": torch.tensor([2.0, 3.0] * 4, dtype=torch.float32),
    "lifted_tensor_1": torch.tensor(0.5),
}
"""Those of `Scaled`, which an export of another library need not have."""
SETTINGS = {"negate": True, "shift": 0.5}


def scaled(mode: str) -> HandPlan:
    torch.manual_seed(1)
    return HandPlan(
        Scaled(),
        (torch.randn(4, 8),),
        cpu_mesh(a=4),
        kwargs=SETTINGS,
        at_rest={"x": "S(0)", "weight": "S(0)", "frozen": "S(0)"},
        mode=mode,
    )


def tied() -> HandPlan:
    """The vocabulary cut at both ends: embedding makes partial sums, the head slices."""
    torch.manual_seed(1)
    return HandPlan(
        Tied(),
        (torch.arange(8).view(2, 4),),
        cpu_mesh(a=2, b=2),
        at_rest={"head.weight": "I,S(0)", "table.weight": "I,S(0)", "ids": "S(0),R"},
        nodes={
            0: (["R,S(0)", "S(0),R"], ["S(0),P"]),
            1: (["S(0),R", "R,S(0)"], ["S(0),S(2)"]),
            2: (["S(0),I"], ["S(0),I"]),
            3: (["S(0),I"], ["P,I"]),
        },
    )


def summands() -> HandPlan:
    torch.manual_seed(1)
    return HandPlan(Summands(), (torch.randn(4, 8),), cpu_mesh(a=4))


def noisy() -> HandPlan:
    torch.manual_seed(1)
    return HandPlan(
        Noisy(),
        (torch.randn(4, 8),),
        cpu_mesh(a=2, b=2),
        at_rest={"x": "S(0),R"},
        nodes={0: (["S(0),R", "R,I", "R,I"], ["S(0),I"]), 1: (["S(0),I"], ["S(0),I"])},
        outputs={0: "S(0),I"},
    )


PLANS: dict[str, Callable[[], HandPlan]] = {
    "scaled training": lambda: scaled("training"),
    "scaled inference": lambda: scaled("inference"),
    "tied": tied,
    "summands": summands,
    "noisy": noisy,
}


def check_scaled_training(hand: HandPlan, plan: Plan) -> None:
    model = Scaled()
    check_training(model, plan, hand.args, SETTINGS)
    assert whole(model(*hand.args, **SETTINGS)["shift"]) == 0.5


def check_scaled_inference(hand: HandPlan, plan: Plan) -> None:
    """Keyword arguments may come in any order."""
    kwargs = dict(reversed(SETTINGS.items()))
    check_inference(Scaled(), plan, hand.args, kwargs)


def check_constants_are_wanted(hand: HandPlan, plan: Plan) -> None:
    document = json.loads(plan.to_json())
    for source in document["stages"][0]["program"]["inputs"]:
        source.pop("contents", None)
    plan = Plan.from_json(json.dumps(document))
    model = Scaled()
    with pytest.raises(PlanError, match=r"no constant 'lifted_tensor_0'; .*constants="):
        parallelize(model, plan, device_mesh(plan))
    assert type(model) is Scaled
    assert isinstance(model.weight, nn.Parameter)
    assert type(model.weight.data) is torch.Tensor
    check_training(model, plan, hand.args, SETTINGS, constants=CONSTANTS)


def check_literals_are_fixed(hand: HandPlan, plan: Plan) -> None:
    model = parallelize(Scaled(), plan, device_mesh(plan))
    with pytest.raises(PlanError, match=r"'shift' was 0.5 .* is 0.25 now"):
        model(*hand.args, shift=0.25, negate=True)
    with pytest.raises(PlanError, match="and called as"):
        model(*hand.args, shift=0.5)


def check_frozen_parameters_stay_frozen(_hand: HandPlan, plan: Plan) -> None:
    model = Scaled()
    model.frozen.requires_grad_()
    with pytest.raises(PlanError, match="'frozen' requires a gradient, which the plan does not"):
        parallelize(model, plan, device_mesh(plan))


def check_a_plan_is_applied_once(_hand: HandPlan, plan: Plan) -> None:
    model = parallelize(Scaled(), plan, device_mesh(plan))
    with pytest.raises(PlanError, match="already"):
        parallelize(model, plan, device_mesh(plan))


def check_tied(hand: HandPlan, plan: Plan) -> None:
    model = Tied()
    check_training(model, plan, hand.args)
    assert model.head.weight is model.table.weight


def check_untied(_hand: HandPlan, plan: Plan) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.table.weight.detach().clone())
    with pytest.raises(PlanError, match="are tied in the plan, but not in the model"):
        parallelize(model, plan, device_mesh(plan))


def check_summands(hand: HandPlan, plan: Plan) -> None:
    """Gradients of two parameters do not share memory, so that clipping scales each once."""
    torch.manual_seed(0)
    model = Summands()
    planned = parallelize(deepcopy(model), plan, device_mesh(plan))
    for either in (model, planned):
        either(*hand.args).backward()
        torch.nn.utils.clip_grad_norm_(either.parameters(), 0.1)
    for name, parameter in model.named_parameters():
        close(whole(planned.get_parameter(name).grad), parameter.grad, name)


def check_noise(hand: HandPlan, plan: Plan) -> None:
    """Copies agree, steps differ, and the same seed gives the same run."""
    mesh = device_mesh(plan)
    runs = []
    for seed in (7, 7, 8):
        torch.manual_seed(0)
        model = parallelize(Noisy(), plan, mesh, seed=seed)
        # Ranks that differ in their own random state must not differ in what they draw.
        torch.manual_seed(torch.distributed.get_rank())
        runs.append([model(*hand.args).detach() for _ in range(2)])
    first, again, other = runs
    assert torch.equal(first[0].full_tensor(), again[0].full_tensor())
    assert torch.equal(first[1].full_tensor(), again[1].full_tensor())
    zeros = [run.to_local() == 0 for run in (*first, other[0])]
    assert not torch.equal(zeros[0], zeros[1])
    assert not torch.equal(zeros[0], zeros[2])
    copies = [torch.empty_like(first[0].to_local()) for _ in range(2)]
    torch.distributed.all_gather(copies, first[0].to_local(), group=mesh.get_group("b"))
    assert torch.equal(copies[0], copies[1])


def check_noise_is_not_recomputed(hand: HandPlan, plan: Plan) -> None:
    model = parallelize(Noisy(), plan, device_mesh(plan))
    result = checkpoint(model, *hand.args, use_reentrant=False)
    with pytest.raises(PlanError, match="cannot be recomputed"):
        result.sum().backward()


def check_registers_are_freed(_hand: HandPlan, plan: Plan) -> None:
    """At any time there are only the values that something reads later."""
    stage = plan.stages[0]
    program = LocalProgram(stage, device_mesh(plan))
    inputs = [torch.ones(placed.local_shape) for placed in stage.inputs]
    for number in range(len(program.instructions) + 1):
        registers = program.registers(inputs)
        execute(program.instructions[:number], registers, ProgramRun(0, Regathers()))
        later = program.instructions[number:]
        made = {slot for instruction in later for slot in instruction.targets}
        read = {slot for instruction in later for slot in instruction.reads}
        filled = {slot for slot, value in enumerate(registers) if value is not None}
        assert filled == (read | program.kept) - made


def check_contradictions_are_found(_hand: HandPlan, plan: Plan) -> None:
    stage = plan.stages[0]
    mesh = device_mesh(plan)
    resharding = stage.reshardings[0]
    broken = {
        "no layouts for node": {"nodes": stage.nodes[1:]},
        "does not divide": {
            "nodes": (stage.nodes[0].model_copy(update={"outputs": ("S(5)",)}), *stage.nodes[1:])
        },
        "which does not use it": {"reshardings": (resharding.model_copy(update={"position": 99}),)},
        "one use of a value twice": {"reshardings": (resharding, resharding)},
        "gives": {
            "inputs": (
                stage.inputs[0].model_copy(update={"local_shape": (1, 1)}),
                *stage.inputs[1:],
            )
        },
    }
    for message, update in broken.items():
        with pytest.raises(PlanError, match=message):
            LocalProgram(stage.model_copy(update=update), mesh)


CASES: dict[str, Checked] = {
    "buffers, constants, frozen parameters": Checked(
        PLANS["scaled training"], check_scaled_training
    ),
    "in inference": Checked(PLANS["scaled inference"], check_scaled_inference),
    "constants are wanted": Checked(PLANS["scaled training"], check_constants_are_wanted),
    "literals are fixed": Checked(PLANS["scaled training"], check_literals_are_fixed),
    "frozen stays frozen": Checked(PLANS["scaled training"], check_frozen_parameters_stay_frozen),
    "applied once": Checked(PLANS["scaled training"], check_a_plan_is_applied_once),
    "tied parameters": Checked(PLANS["tied"], check_tied),
    "untied parameters": Checked(PLANS["tied"], check_untied),
    "gradients of summands": Checked(PLANS["summands"], check_summands),
    "noise": Checked(PLANS["noisy"], check_noise),
    "noise is not recomputed": Checked(PLANS["noisy"], check_noise_is_not_recomputed),
    "registers are freed": Checked(PLANS["scaled training"], check_registers_are_freed),
    "contradictions are found": Checked(PLANS["scaled training"], check_contradictions_are_found),
}
