"""Attention that is cut along queries, heads or keys, on real ranks: exact, and as planned."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from support.attention import decoder, decoding, llama
from support.comparison import check_inference, check_training
from support.meshes import slow_devices
from support.models import Case as Built
from support.models import graph_of

from autoshard.checker import check_plan
from autoshard.plan import Mode, Pins, Plan, PlanOptions
from autoshard.planner import make_plan

SIZES = {"width": 32, "hidden": 64, "vocabulary": 64}
QUERIES, HEADS = "S(2) R R", "S(1) S(1) S(1)"
KEYS = "R S(2) S(2)"


@dataclass
class Case:
    """A model on one sequence, and how its attention takes queries, keys, values and mask.

    Where it is not pinned so, it is what the cheapest plan does.
    """

    build: Callable[[], Built]
    taken: str
    mode: Mode = "training"
    pinned: bool = False
    axes: tuple[int, ...] = (4,)
    activation_checkpointing: str = "never"
    inside: int = 0
    plan: Plan = field(init=False)

    def prepare(self) -> None:
        torch.manual_seed(0)
        graph = graph_of(self.build())
        pins = {"scaled_dot_product_attention*": f"{self.taken} -> *"} if self.pinned else {}
        options = PlanOptions(
            pins=Pins(nodes=pins),
            mode=self.mode,
            activation_checkpointing=self.activation_checkpointing,
        )
        plan = make_plan(graph, slow_devices(**dict(zip("ab", self.axes, strict=False))), options)
        assert plan.found, plan.reason
        assert check_plan(plan, graph) == ()
        nodes = {node.name: node for node in plan.stages[0].nodes}
        calls = [n.name for n in graph.nodes if "scaled_dot_product" in n.operator]
        assert {" ".join(nodes[name].inputs) for name in calls} == {self.taken}
        assert {len(nodes[name].inside) for name in calls} == {self.inside}
        assert bool(plan.stages[0].checkpoints) == (self.activation_checkpointing == "always")
        self.plan = Plan.from_json(plan.to_json())

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        check = check_training if self.mode == "training" else check_inference
        check(model, self.plan, kwargs=inputs)


MODES: tuple[Mode, ...] = ("training", "inference")
CASES = {
    **{
        f"heads in between, {mode}": Case(
            partial(decoder, 32, heads=4, groups=4, **SIZES), HEADS, mode
        )
        for mode in MODES
    },
    **{
        f"masked queries, {mode}": Case(
            partial(llama, 32, heads=4, groups=2, **SIZES), f"{QUERIES} S(2)", mode, pinned=True
        )
        for mode in MODES
    },
    "masked keys": Case(partial(llama, 32, heads=2, groups=1, **SIZES), f"{KEYS} S(3)", inside=2),
    "causal queries": Case(partial(decoder, 32, heads=4, groups=2, **SIZES), QUERIES),
    "causal keys": Case(partial(decoder, 64, heads=2, groups=2, **SIZES), KEYS, inside=2),
    "causal keys that run again": Case(
        partial(decoder, 16, heads=4, groups=2, **SIZES),
        KEYS,
        pinned=True,
        activation_checkpointing="always",
        inside=2,
    ),
    "causal queries and keys": Case(
        partial(decoder, 16, heads=4, groups=2, **SIZES),
        "S(2),R R,S(2) R,S(2)",
        pinned=True,
        axes=(2, 2),
        inside=2,
    ),
    "masked keys on two axes": Case(
        partial(llama, 16, heads=4, groups=2, **SIZES),
        "R,R S(2),S(2) S(2),S(2) S(3),S(3)",
        pinned=True,
        axes=(2, 2),
        inside=4,
    ),
    "a long cache": Case(
        partial(decoding, 64, width=32, heads=4, groups=2), KEYS, "inference", inside=2
    ),
}
LONG = ("heads in between, inference", "masked queries, training", "causal queries")
"""Each dim that is cut, each mask and each mode is in one of the others."""
