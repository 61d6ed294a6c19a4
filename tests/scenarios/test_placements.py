"""Scenarios D: expected DTensor placements; ids as in docs/scenarios.csv.

Source: meta-pytorch/autoparallel, tests. Its low and high memory bounds are pins here:
`all that can be is cut` and `replication is allowed`.
"""

from functools import cache
from typing import Any

import pytest
import torch
from scenarios.alpa import operators, optimal, parameters
from scenarios.architectures import empty, graph_of
from support.meshes import one_rate_mesh
from torch import nn

from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.mesh import make_mesh
from autoshard.plan import Plan

FLAT, TALL = one_rate_mesh(256), one_rate_mesh(32, 8)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = (
            w(x).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.wo(mixed.reshape(batch, sequence, width))
        return x + self.w2(self.w1(x).relu())


class Shifted(nn.Module):
    """A small parameter, and a constant that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(128))
        self.ones = nn.Buffer(torch.empty(1, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift * self.ones


@cache
def build(module: type[nn.Module], *args: Any, x: tuple[int, ...], **kwargs: Any) -> Graph:
    with torch.device("meta"):
        model = module(*args, **kwargs)
    return graph_of(model, x=empty(*x))


def placed(graph: Graph, mesh: Any = FLAT, **options: Any) -> Plan:
    """Compute has its price here, so nothing need be forbidden."""
    return optimal(graph, mesh, skip_fully_replicated=False, **options)


def objective(plan: Plan) -> float:
    """What the whole plan costs."""
    assert plan.certificate.objective is not None
    return plan.certificate.objective


def pinned(batch: str, weights: dict[str, str] | None = None) -> dict[str, Any]:
    return {"inputs": {"*": batch}, "outputs": {"*": batch}, "parameters": weights or {}}


FEED_FORWARD = (FeedForward, (1024, 4096), (2048 * 256, 1024), 2)
BLOCK = (Block, (6144, 24576, 48), (8 * 256, 256, 6144), 6)


@pytest.mark.parametrize("rest", ["S(0)", "I"], ids=["D1 cut at rest", "D2 replicated at rest"])
@pytest.mark.parametrize("model", [FEED_FORWARD, BLOCK], ids=["feed-forward", "D3 block"])
def test_d1_d2_d3_products_see_whole_weights_and_their_share_of_the_batch(
    model: tuple[type[nn.Module], tuple[int, ...], tuple[int, ...], int], rest: str
) -> None:
    """The types say it of the gradients too.

    Weights used as R have gradients that are partial sums, and inputs cut along the batch
    have gradients cut so: of each product's three, two stand in the types of the first.
    """
    module, sizes, shape, num_products = model
    graph = build(module, *sizes, x=shape)
    plan = placed(graph, pins=pinned("S(0)", {"*": rest}))
    assert set(parameters(plan).values()) == {rest}
    products = operators(plan, graph, "linear")
    assert len(products) == num_products
    assert set(products) == {(("S(0)", "R"), "S(0)")}
    kinds = {"all_reduce"} if rest == "I" else {"all_gather", "reduce_scatter"}
    assert {c.kind for c in plan.collectives} == kinds
    assert {c.count for c in plan.collectives} == {num_products}


def test_d1_gradients_over_many_nodes_are_all_reduced_as_nccl_has_trees_for_that_alone() -> None:
    """A reduce-scatter has 255 steps, more time than a tree needs for twice the bytes."""
    module, sizes, shape, _ = FEED_FORWARD
    graph = build(module, *sizes, x=shape)
    plan = placed(graph, make_mesh((256,)), pins=pinned("S(0)", {"*": "S(0)"}))
    assert {c.kind for c in plan.collectives} == {"all_gather", "all_reduce"}
    assert set(operators(plan, graph, "linear")) == {(("S(0)", "R"), "S(0)")}


def test_d5_a_block_on_two_axes_is_cut_by_batch_and_heads() -> None:
    module, sizes, shape, _ = BLOCK
    graph = build(module, *sizes, x=shape)
    plan = placed(graph, TALL, pins=pinned("S(0),R"))
    lies = parameters(plan)
    for name in ("wq", "wk", "wv", "w1"):
        assert lies[f"{name}.weight"].startswith("S(0),S(0)"), name
    (attention,) = operators(plan, graph, "scaled_dot_product_attention")
    assert attention == (("S(0),S(1)",) * 3, "S(0),S(1)")


def test_d5_a_whole_output_weight_is_cheaper_than_the_published_rows() -> None:
    """Published: wo at rest (S(0), S(1)), used by rows, whose sums are then reduced.

    At rest that costs little more. In use it costs more than ours: an all-to-all from heads
    to positions, and wo, w1 and w2 gathered whole over both axes as one group, since activations
    are the larger here.
    """
    module, sizes, shape, _ = BLOCK
    graph = build(module, *sizes, x=shape)
    free = placed(graph, TALL, pins=pinned("S(0),R"))
    assert {used for (_, used), _ in operators(free, graph, "linear")[3:]} == {"R,R"}
    at_rest = placed(graph, TALL, pins=pinned("S(0),R", {"wo.weight": "S(0),S(1)"}))
    assert objective(free) < objective(at_rest) < 1.001 * objective(free)
    rows = {**pinned("S(0),R"), "nodes": {"linear_3": "*,S(2) *,S(1) -> *,P"}}
    assert objective(placed(graph, TALL, pins=rows)) > 1.001 * objective(free)


def test_d6_a_parameter_smaller_than_the_mesh_stays_whole() -> None:
    graph = build(Shifted, x=(4096, 8, 128))
    plan = placed(graph, pins={"inputs": {"*": "S(0)"}}, memory_budget=10**9)
    assert parameters(plan) == {"shift": "I"}


def test_d7_a_dim_that_not_all_ranks_divide_is_cut_on_some() -> None:
    """280 does not divide into 256, but into 8, and 1024 into 32."""
    graph = build(FeedForward, 1024, 280, bias=True, x=(256, 1024))
    loose = placed(graph, TALL)
    assert loose.memory is not None
    tight = placed(graph, TALL, memory_budget=loose.memory.peak // 7)
    assert tight.memory is not None
    assert tight.memory.peak <= loose.memory.peak // 7
    whole = {"pins": {"parameters": {"up.weight": "S(0),S(0)"}}}
    with pytest.raises(OptionError, match="does not divide into 256"):
        placed(graph, TALL, **whole)


def test_d8_a_pin_holds_among_cut_parameters_and_can_be_taken_back() -> None:
    module, sizes, shape, _ = FEED_FORWARD
    graph = build(module, *sizes, x=shape)
    one = {"up.weight": "R", "down.weight": "S(0)"}
    plans = [
        placed(graph, pins=pinned("S(0)", weights))
        for weights in ({"*": "S(0)"}, one, dict(reversed(one.items())), {"*": "S(0)"})
    ]
    first, second, third, fourth = map(parameters, plans)
    assert first == fourth == {"up.weight": "S(0)", "down.weight": "S(0)"}
    assert second == third == {"up.weight": "I", "down.weight": "S(0)"}


def test_d9_an_attention_over_cut_positions_can_be_prescribed() -> None:
    """Queries keep their positions, keys and values are gathered for them.

    The types prescribe the gradients too: those of keys and values are partial sums, which
    the gather's transpose reduces and scatters.
    """
    module, sizes, shape, _ = BLOCK
    graph = build(module, *sizes, x=shape)
    region = "S(0),S(2) S(0),Replicate() S(0),Replicate() -> S(0),S(2)"
    pins = {**pinned("S(0),S(1)"), "nodes": {"scaled_dot_product_attention": region}}
    plan = placed(graph, TALL, pins=pins)
    (attention,) = operators(plan, graph, "scaled_dot_product_attention")
    assert attention == (("S(0),S(2)", "S(0),R", "S(0),R"), "S(0),S(2)")
    gathers = [c for c in plan.stages[0].reshardings if c.value in {"linear_1", "linear_2"}]
    steps = [(s.forward, s.backward) for c in gathers for s in c.steps]
    assert steps == [("all_gather", "reduce_scatter")] * 2


def test_d10_a_constant_is_in_the_plan() -> None:
    plan = placed(build(Shifted, x=(4096, 8, 128)), pins={"inputs": {"*": "S(0)"}})
    (ones,) = [i for i in plan.stages[0].inputs if i.target == "ones"]
    assert (ones.shape, ones.layout) == ((1, 8, 1), "R")


ILLEGAL = {
    "100 rows over 256": ((100, 64), FLAT, "S(0)"),
    "32 rows over 32 and 8": ((32, 64), TALL, "S(0),S(0)"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_d12_cuts_that_leave_ranks_empty_are_refused(name: str) -> None:
    shape, mesh, layout = ILLEGAL[name]
    graph = build(FeedForward, 64, 64, x=shape)
    with pytest.raises(OptionError, match="does not divide into 256"):
        placed(graph, mesh, pins={"inputs": {"x": layout}})
