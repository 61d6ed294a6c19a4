"""Dims that an axis does not divide, cut all the same: steps, models and checkpoints.

In double precision, so that nothing but the order of sums may differ from the whole model.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runtime.comparison import check_training, close, device_mesh, whole
from runtime.hand_plans import Checked, HandPlan, cpu_mesh
from runtime.recomputation import edited
from support import models
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard.errors import PlanError
from autoshard.layouts import STEPS, Conversions, Kind, Layout, Step, parse_type
from autoshard.plan import Plan, PlannedStep, PlanOptions, check_plan, make_plan
from autoshard.runtime import checkpointable, parallelize
from autoshard.runtime.conversions import bind_steps
from autoshard.runtime.recorder import CollectiveRecord, record_collectives

NUM_RANKS = 4
EXACT = 1e-10
SHAPE = (10, 8, 7)
"""Four ranks hold 3, 3, 3 and 1 of dim 0, two each of dim 1, and 2, 2, 2 and 1 of dim 2."""
GRADIENT = {"I": "I", "R": "P", "P": "I"}
"""Type of the gradient of a value of each type, a gradient seen as a value."""
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


class _Free:
    """One step is cheaper than two."""

    def collective_time(self, _action: str, _axis: int, _nbytes: int) -> float:
        return 1.0

    def copy_time(self, _nbytes: int) -> float:
        return 0.0


def planned_step(source: str, target: str) -> Step:
    """The step as the planner has it."""
    table = Conversions(SHAPE, 8, (NUM_RANKS,), differentiable=True, pricer=_Free())
    actions = STEPS[Kind(source[0]), Kind(target[0])]
    (found,) = (
        table._step(i)
        for i in range(len(table._moves.axes))
        if (
            str(table.layouts[table._moves.sources[i]]),
            str(table.layouts[table._moves.targets[i]]),
        )
        == (source, target)
    )
    assert (found.forward, found.backward) == actions
    return found


def filled(source: str, target: str) -> int:
    """Elements of the larger tensor of a step, with slices as long as the largest."""
    sizes = list(SHAPE)
    cut = [parse_type(text).dim for text in (source, target) if text.startswith("S")]
    for dim in cut:
        sizes[dim] = NUM_RANKS * -(-SHAPE[dim] // NUM_RANKS)
    elements = sizes[0] * sizes[1] * sizes[2]
    return elements // NUM_RANKS if len(cut) > 1 else elements


def cut(value: torch.Tensor, kind: str, rank: int) -> torch.Tensor:
    """A rank's part of a logical value."""
    if kind in "IR":
        return value.clone()
    if kind == "P":
        weights = torch.arange(1, NUM_RANKS + 1)
        weights[-1] -= weights.sum() - 1
        return value * weights[rank]
    return value.chunk(NUM_RANKS, parse_type(kind).dim)[rank].clone()


def merge(part: torch.Tensor, kind: str) -> torch.Tensor:
    """The logical value that the ranks' parts make up."""
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, part)
    if kind in "IR":
        for other in parts:
            torch.testing.assert_close(other, parts[0], rtol=0, atol=0)
        return parts[0]
    if kind == "P":
        return torch.stack(parts).sum(0)
    return torch.cat(parts, parse_type(kind).dim)


def check_step(source: str, target: str) -> None:
    """The logical value survives the step, and so does the logical gradient."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("a",))
    found = planned_step(source, target)
    assert found.nbytes == 8 * filled(source, target)
    (run,) = bind_steps([_as_planned(found)], mesh, SHAPE)
    value, cotangent = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(2))
    before = cut(value, source, mesh.get_local_rank()).requires_grad_()
    with record_collectives(mesh) as recorder:
        after = run(before)
        after.backward(cut(cotangent, GRADIENT.get(target, target), mesh.get_local_rank()))
    assert before.grad is not None
    assert before.grad.shape == before.shape
    torch.testing.assert_close(merge(after.detach(), target), value)
    torch.testing.assert_close(merge(before.grad, GRADIENT.get(source, source)), cotangent)
    assert recorder.records == [
        CollectiveRecord(str(action), "a", found.nbytes, direction)
        for action, direction in ((found.forward, "forward"), (found.backward, "backward"))
        if action in COLLECTIVES
    ]


def check_flags(source: str, target: str) -> None:
    """Masks have no gradient, and are filled up like numbers."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("a",))
    (run,) = bind_steps([_as_planned(planned_step(source, target))], mesh, SHAPE)
    value = torch.rand(SHAPE) < 0.5
    after = run(cut(value, source, mesh.get_local_rank()))
    assert torch.equal(merge(after, target), value)


def _as_planned(step: Step) -> PlannedStep:
    return PlannedStep(
        axis="a",
        source=str(step.source),
        target=str(step.target),
        forward=step.forward,
        backward=step.backward,
        nbytes=step.nbytes,
        time=0.0,
    )


class Net(nn.Module):
    """Two linear layers and a loss: linear, relu, linear, pow, mean. Hidden are 18, or 17."""

    def __init__(self, hidden: int = 18) -> None:
        super().__init__()
        self.up = nn.Linear(7, hidden)
        self.down = nn.Linear(hidden, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(torch.relu(self.up(x)))
        return y.pow(2).mean(), y


UP, RELU, DOWN, POW, MEAN = range(5)


def net(batch: int = 10, length: int = 10, hidden: int = 18) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    return Net(hidden).double(), torch.randn(batch, length, 7, dtype=torch.float64)


def data_parallel(at_rest: dict[str, str] | None = None) -> HandPlan:
    """A batch of 10 on 4 ranks: R -> S, and gradients reduced over ranks with other shares."""
    model, x = net()
    return HandPlan(
        model,
        (x,),
        cpu_mesh(dp=4),
        at_rest={"x": "S(0)", **(at_rest or {})},
        nodes={
            UP: (["S(0)", "R", "R"], ["S(0)"]),
            RELU: (["S(0)"], ["S(0)"]),
            DOWN: (["S(0)", "R", "R"], ["S(0)"]),
            POW: (["S(0)"], ["S(0)"]),
            MEAN: (["S(0)"], ["P"]),
        },
        outputs={1: "S(0)"},
    )


def fully_sharded() -> HandPlan:
    """S -> R: 18 and 7 rows, 18 columns at rest on 4 ranks."""
    at_rest = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)", "down.bias": "S(0)"}
    return data_parallel(at_rest)


def whole_batch() -> HandPlan:
    """R -> S: every rank reads the whole batch."""
    return data_parallel({"x": "R"})


def moved_shards() -> HandPlan:
    """S(a) -> S(b), both uneven, and one of them even."""
    plan = data_parallel({"x": "S(2)"})
    plan.nodes = {**plan.nodes, RELU: (["S(1)"], ["S(1)"])}
    return plan


def sequence_parallel() -> HandPlan:
    """S -> R and P -> S of a length of 10 around 18 hidden features."""
    model, x = net()
    return HandPlan(
        model,
        (x,),
        cpu_mesh(tp=4),
        at_rest={"x": "S(1)", "up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
        nodes={
            UP: (["R", "S(0)", "S(0)"], ["S(2)"]),
            RELU: (["S(2)"], ["S(2)"]),
            DOWN: (["S(2)", "S(1)", "P"], ["P"]),
            POW: (["S(1)"], ["S(1)"]),
            MEAN: (["S(1)"], ["P"]),
        },
        shared={"linear_1": "S(1)"},
        outputs={1: "S(1)"},
    )


def whole_at_rest() -> HandPlan:
    """I -> S: weights of which a rank uses its rows."""
    plan = sequence_parallel()
    plan.at_rest = {"x": "S(1)"}
    return plan


def megatron(batch: int, hidden: int) -> HandPlan:
    """Column- then row-parallel over tp, batch over dp."""
    model, x = net(batch, hidden=hidden)
    return HandPlan(
        model,
        (x,),
        cpu_mesh(dp=2, tp=2),
        at_rest={
            "x": "S(0),R",
            "up.weight": "I,S(0)",
            "up.bias": "I,S(0)",
            "down.weight": "S(0),S(1)",
        },
        nodes={
            UP: (["S(0),R", "R,S(0)", "R,S(0)"], ["S(0),S(2)"]),
            RELU: (["S(0),S(2)"], ["S(0),S(2)"]),
            DOWN: (["S(0),S(2)", "R,S(1)", "R,P"], ["S(0),P"]),
            POW: (["S(0),I"], ["S(0),I"]),
            MEAN: (["S(0),I"], ["P,I"]),
        },
        shared={"linear_1": "S(0),I"},
        outputs={1: "S(0),I"},
    )


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
    conversions = (c.model_copy(update={"again": c.value == weight}) for c in stage.conversions)
    again = edited(plan, conversions=tuple(conversions))
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
    """The whole batch, a rank's own rows and a DTensor are the same input."""
    model, x = net()
    mesh = device_mesh(plan)
    planned = parallelize(model, plan, mesh)
    rank = mesh.get_local_rank()
    mine = x.chunk(NUM_RANKS)[rank]
    distributed = distribute_tensor(x, mesh, planned(x)[1].placements)
    for given in (mine, distributed):
        loss, y = planned(given)
        assert loss == planned(x)[0]
        assert isinstance(y, DTensor)
        assert y.shape == x.shape
        assert y.to_local().shape == mine.shape
        close(whole(y.detach()), Net.forward(net()[0], x)[1].detach(), "output", EXACT)
    other = x[:3] if rank == NUM_RANKS - 1 else x[:1]
    with pytest.raises(PlanError, match=rf"\(10, 10, 7\), or \({len(mine)}, 10, 7\)"):
        planned(other)


class Gpt2(nn.Module):
    """GPT-2 with an odd vocabulary and a loss in its own precision."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            n_positions=16,
            vocab_size=67,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        self.lm = GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm(ids, use_cache=False).logits
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
        )


class Heads(nn.Module):
    """Attention of 25 heads that come as a dim of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(25, 4, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (x @ weight for weight in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.norm(seen).square().mean()


class Along(nn.Module):
    """What works along 18 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 18)
        self.norm = nn.LayerNorm(18)
        self.out = nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.up(x))
        h = torch.softmax(h, -1) + h.var(-1, keepdim=True) + h.amax(-1, keepdim=True)
        return self.out(h).square().mean()


def gpt2_case() -> models.Case:
    labels = torch.randint(0, 67, (4, 8))
    labels[0, :5] = -100
    return Gpt2(), {"ids": torch.randint(0, 67, (4, 8)), "labels": labels}


def rows_case() -> models.Case:
    features = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
    return features, {"input": torch.randn(10, 6, 8, dtype=torch.float64)}


MODELS: dict[str, Callable[[], models.Case]] = {
    "gpt2": gpt2_case,
    "heads": lambda: (Heads(), {"x": torch.randn(2, 25, 6, 4, dtype=torch.float64)}),
    "queries": lambda: (Heads(), {"x": torch.randn(2, 25, 10, 4, dtype=torch.float64)}),
    "along": lambda: (Along(), {"x": torch.randn(6, 8, dtype=torch.float64)}),
    "rows": rows_case,
}


def model_of(name: str) -> models.Case:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.double(), inputs


@dataclass
class Planned:
    """One model on one mesh, steered.

    Attributes:
        model: its name.
        options: that steer.
        cuts: values that something must take in this layout.
        axes: of the mesh.
    """

    model: str
    options: dict[str, Any]
    cuts: dict[str, str]
    axes: dict[str, int] = field(default_factory=lambda: {"a": 4})
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        graph = graph_of(model_of(self.model))
        options = PlanOptions.model_validate(self.options)
        plan = make_plan(graph, slow_devices(**self.axes), options)
        assert plan.found, plan.reason
        assert check_plan(plan, graph) == ()
        self.plan = Plan.from_json(plan.to_json())
        (stage,) = self.plan.stages
        taken = {placed.name: placed.inputs[0] for placed in stage.nodes}
        taken.update((n, p.layout) for p in stage.parameters for n in (p.target, *p.aliases))
        assert {name: taken[name] for name in self.cuts} == self.cuts

    def __call__(self) -> None:
        model, inputs = model_of(self.model)
        check_training(model, self.plan, kwargs=inputs, tolerance=EXACT)


LOSS = "cross_entropy_loss_cross_entropy_loss"
VOCABULARY = {
    "pins": {
        "parameters": {"lm.transformer.wte.weight": "S(0)"},
        "nodes": {LOSS: "S(1) R -> *", "embedding": "S(0) R -> P"},
    }
}
TIED = "lm.transformer.wte.weight"
ATTENTION = "scaled_dot_product_attention"
PLANNED = {
    "vocabulary": Planned("gpt2", VOCABULARY, {LOSS: "S(1)", "embedding": "S(0)", TIED: "S(0)"}),
    "vocabulary and batch": Planned(
        "gpt2",
        {"pins": {"nodes": {LOSS: "S(0),S(1) * -> *", "embedding": "R,S(0) * -> *"}}},
        {LOSS: "S(0),S(1)", "embedding": "R,S(0)"},
        {"dp": 2, "tp": 2},
    ),
    "vocabulary, checkpointed": Planned(
        "gpt2",
        {**VOCABULARY, "checkpointing": "always"},
        {LOSS: "S(1)", "embedding": "S(0)"},
    ),
    "heads": Planned(
        "heads", {"pins": {"nodes": {ATTENTION: "S(1) S(1) S(1) -> S(1)"}}}, {ATTENTION: "S(1)"}
    ),
    "queries": Planned(
        "queries", {"pins": {"nodes": {ATTENTION: "S(2) R R -> S(2)"}}}, {ATTENTION: "S(2)"}
    ),
    "along": Planned(
        "along",
        {"pins": {"nodes": dict.fromkeys(("softmax", "var", "amax"), "S(1) -> *")}},
        {"softmax": "S(1)", "var": "S(1)", "amax": "S(1)"},
    ),
    "a batch of 10": Planned("rows", {"batch_axis": "a"}, {"gelu": "S(0)", "layer_norm": "S(0)"}),
}


@dataclass
class Saved:
    """What is saved under one plan is loaded under another, and by a whole model."""

    axes: dict[str, int]
    saved: dict[str, str]
    loaded: dict[str, str]
    plans: list[Plan] = field(default_factory=list)

    def prepare(self) -> None:
        graph = graph_of(model_of("gpt2"))
        for layouts in (self.saved, self.loaded):
            options = PlanOptions.model_validate({"pins": {"parameters": layouts}})
            plan = make_plan(graph, slow_devices(**self.axes), options)
            assert plan.found, plan.reason
            self.plans.append(plan)

    def __call__(self) -> None:
        folder = [mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        self.check(str(folder[0]))
        dist.barrier()
        if dist.get_rank() == 0:
            rmtree(str(folder[0]))

    def check(self, folder: str) -> None:
        mesh = device_mesh(self.plans[0])
        model, state = self.state(self.plans[0], mesh)
        expected = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
        moments = [whole(s["exp_avg"]).clone() for s in state["optimizer"].values()]
        assert any(moment.any() for moment in moments)
        dcp.save(checkpointable(state), checkpoint_id=folder)

        plain = {"model": model_of("gpt2")[0].state_dict()}
        dcp.load(plain, checkpoint_id=folder)
        for name, tensor in expected.items():
            close(plain["model"][name], tensor, name, 0)

        other, state = self.state(self.plans[1], mesh)
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        dcp.load(checkpointable(state), checkpoint_id=folder)
        for name, tensor in expected.items():
            close(whole(other.state_dict()[name]), tensor, name, 0)
        for slots, moment in zip(state["optimizer"].values(), moments, strict=True):
            close(whole(slots["exp_avg"]), moment, "moment", 0)

    @staticmethod
    def state(plan: Plan, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
        """After a step, so that the optimizer has a state."""
        model, inputs = model_of("gpt2")
        parallelize(model, plan, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        model(**inputs).backward()
        optimizer.step()
        return model, {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict()["state"],
        }


PAIRS = [
    (source, target)
    for source in ("I", "R", "P", "S(0)", "S(1)", "S(2)")
    for target in ("I", "R", "P", "S(0)", "S(1)", "S(2)")
    if source != target and (Kind(source[0]), Kind(target[0])) in STEPS
]
CUTTING = [pair for pair in PAIRS if "S" in "".join(pair)]
CASES: dict[str, Callable[[], None]] = {
    **{f"{s}->{t}": partial(check_step, s, t) for s, t in CUTTING},
    **{f"flags {s}->{t}": partial(check_flags, s, t) for s, t in CUTTING if s != "P"},
    **{f"by hand, {name}": Checked(make, check_hand_plan) for name, make in HAND.items()},
    "gathered again": Checked(HAND["fully sharded"], check_gathered_again),
    "at rest": Checked(HAND["fully sharded"], check_rests),
    "arguments": Checked(HAND["data parallel"], check_arguments),
    **PLANNED,
    "a checkpoint": Saved({"a": 4}, {"*.weight": "S(0)"}, {"*.weight": "I"}),
    "another checkpoint": Saved({"a": 4}, {"*": "I"}, {TIED: "S(0)"}),
    "a checkpoint with thirds": Saved(
        {"a": 2, "b": 2},
        {TIED: "S(0),S(1)", "*.c_attn.weight": "S(0),S(1)/1+1+1"},
        {TIED: "S(1),S(0)"},
    ),
}


def test_layouts_of_the_shape_have_uneven_cuts() -> None:
    """The cases above are what they are said to be."""
    assert Layout.parse("S(0)").local_slices(SHAPE, (4,), (3,))[0] == (slice(9, 10),)
    assert Layout.parse("S(2)").local_slices(SHAPE, (4,), (3,))[2] == (slice(6, 7),)


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_uneven(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
