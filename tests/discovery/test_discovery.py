"""Discovery of rules of custom operators, and operators that it refuses."""

import json
import time
from dataclasses import replace

import pytest
import torch
from support import custom_operators
from support.meshes import slow_devices
from support.models import graph_of
from torch import nn

from autoshard import discover as public_discover
from autoshard.checker import check_plan
from autoshard.discovery import Finding, discover
from autoshard.discovery.probe import probe_of
from autoshard.discovery.search import RuleSearch
from autoshard.discovery.shapes import smaller_sizes
from autoshard.errors import GraphError, SchemaError, UnsupportedError
from autoshard.graph import (
    CallRule,
    DType,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    graph_digest,
    graph_from_json,
    graph_to_json,
    rules_from_json,
    rules_to_json,
)
from autoshard.ops import Call, axis_rules, with_rules
from autoshard.ops.rules.index_space import operator_rule
from autoshard.plan import PlanOptions
from autoshard.planner import make_plan
from autoshard_solver_cache import NamespacedCache, SolverCache

FLOAT = DType.FLOAT32


@torch.library.custom_op("shardtest::pairs", mutates_args=())
def pairs(x: torch.Tensor) -> torch.Tensor:
    return x[..., ::2] * x[..., 1::2]


@torch.library.custom_op("shardtest::groups", mutates_args=())
def groups(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Subtracts the mean of each of some groups of columns."""
    parts = x.unflatten(1, (num_groups, -1))
    return (parts - parts.mean(2, keepdim=True)).flatten(1)


@torch.library.custom_op("shardtest::blocks", mutates_args=())
def blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Scales each block of columns to a largest number of 1."""
    parts = x.unflatten(1, (-1, size))
    return (parts / parts.abs().amax(2, keepdim=True)).flatten(1)


@torch.library.custom_op("shardtest::first", mutates_args=())
def first(x: torch.Tensor, count: int) -> torch.Tensor:
    """Doubles the first rows."""
    return torch.cat([2 * x[:count], x[count:]])


@torch.library.custom_op("shardtest::prefix", mutates_args=())
def prefix(x: torch.Tensor) -> torch.Tensor:
    """Doubles the first 100 rows, and no attribute says so."""
    return torch.cat([2 * x[:100], x[100:]])


@torch.library.custom_op("shardtest::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight + bias


@torch.library.custom_op("shardtest::picked", mutates_args=())
def picked(x: torch.Tensor) -> torch.Tensor:
    return x[x[:, 0] > 0]


@torch.library.custom_op("shardtest::writes", mutates_args=())
def writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + 1


@torch.library.custom_op("shardtest::nothing", mutates_args=())
def nothing(x: torch.Tensor) -> torch.Tensor:
    return (x > 1e9).float()


@torch.library.custom_op("shardtest::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(f"{x.dim()} dims are not what I want")


@torch.library.custom_op("shardtest::copies", mutates_args=())
def copies(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [x.softmax(0)[0].expand((2,) * 5).clone() for _ in range(count)]


@torch.library.custom_op("shardtest::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype is torch.bfloat16
    return torch.relu(x)


def call(
    packet: str, *shapes: tuple[int, ...], out: tuple[int, ...], dtype: DType = FLOAT, **given: int
) -> Call:
    schema = getattr(torch.ops.shardtest, packet).default._schema
    names = [argument.name for argument in schema.arguments]
    arguments = (*((name, Ref(name)) for name in names[: len(shapes)]), *given.items())
    tensors = tuple(Tensor(shape, dtype, requires_grad=True) for shape in shapes)
    operator = f"shardtest.{packet}.default"
    return Call(operator, arguments, tensors, (Tensor(out, dtype, requires_grad=True),))


def found(made: Call) -> CallRule:
    torch.set_num_threads(1)
    return RuleSearch(probe_of(made), time.monotonic() + 60).rule()


def free(made: Call, parts: int = 2) -> dict[str, int]:
    """What may be sharded: the options of one axis, and into how many parts at most."""
    rule = found(made)
    sizes = dict(rule.sizes)
    options = axis_rules(operator_rule(made, rule), parts)
    return {str(option): sizes[option.letter] for option in options if option.letter is not None}


@torch.library.custom_op("shardtest::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = x.chunk(2, -1)
    return left.clone(), right.clone()


@torch.library.custom_op("shardtest::beside", mutates_args=())
def beside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, y], -1)


halves.register_fake(lambda x: tuple(map(torch.empty_like, x.chunk(2, -1))))
beside.register_fake(lambda x, y: x.new_empty(*x.shape[:-1], x.shape[-1] + y.shape[-1]))
halves.register_autograd(lambda _, *gradients: torch.cat(gradients, -1))
beside.register_autograd(
    lambda ctx, gradient: gradient.split(ctx.sizes, -1),
    setup_context=lambda ctx, inputs, output: setattr(  # noqa: ARG005  torch names them
        ctx, "sizes", [x.shape[-1] for x in inputs]
    ),
)


class Fused(nn.Module):
    """A gated layer whose halves an operator takes apart, or which it joins."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(1024, 8192), nn.Linear(8192, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.up(x)
        left, right = fused.chunk(2, -1) if self.kind in {"chunk", "beside"} else halves(fused)
        made = (left.sigmoid(), right.tanh())
        joined = beside(*made) if self.kind == "beside" else torch.cat(made, -1)
        return self.down(joined).square().mean()


@pytest.mark.parametrize("kind", ["halves", "beside"])
def test_what_splits_or_joins_a_dim_is_planned_like_chunk_and_cat(kind: str) -> None:
    plans = []
    for one in ("chunk", kind):
        graph = graph_of((Fused(one).to("meta"), {"x": torch.empty(16, 1024, device="meta")}))
        made = discover(graph).graph
        plans.append(make_plan(made, slow_devices(a=4), PlanOptions()))
        assert check_plan(plans[-1], made) == ()
    rules = plans[1].stages[0].program["rules"]
    assert [rule["pieces"] for rule in rules]
    assert plans[1].collectives == plans[0].collectives


def test_a_rule_with_wrong_pieces_is_refused() -> None:
    graph = graph_of((Fused("halves").to("meta"), {"x": torch.empty(16, 1024, device="meta")}))
    (rule,) = rules_to_json(discover(graph).graph.rules)
    (whole, pieces), *_ = rule["pieces"]
    for wrong in ([[2, pieces[0][1]], pieces[1]], pieces[:1], [[1, "zz"], pieces[1]]):
        with pytest.raises(SchemaError, match="piece"):
            with_rules(graph, rules_from_json([rule | {"pieces": [[whole, wrong]]}]))


def test_a_pair_of_columns_stays_together() -> None:
    made = free(call("pairs", (64, 4096), out=(64, 2048)))
    assert made == {"S(0)->S(0)": 64, "S(1)->S(1)": 2048}


def test_as_many_parts_as_groups() -> None:
    """On a rank the number of groups stays, so a part of the columns is no share of them."""
    made = free(call("groups", (64, 4096), out=(64, 4096), num_groups=32))
    assert made == {"S(0)->S(0)": 64}


def test_blocks_stay_whole() -> None:
    made = free(call("blocks", (64, 4096), out=(64, 4096), size=128))
    assert made == {"S(0)->S(0)": 64, "S(1)->S(1)": 32}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (
            call("product", (3, 5), (5, 7), (7,), out=(3, 7)),
            {
                3: {"S(0),R,R->S(0)": 3},
                5: {"S(1),S(0),P->P": 5},
                7: {"R,S(1),S(0)->S(1)": 7},
                2: {},
            },
        ),
        (call("pairs", (77, 512), out=(77, 256)), {7: {"S(0)->S(0)": 77}, 11: {"S(0)->S(0)": 77}}),
        (
            call("blocks", (9, 15), out=(9, 15), size=5),
            {3: {"S(0)->S(0)": 9, "S(1)->S(1)": 3}, 5: {}},
        ),
        (
            call("blocks", (30, 18), out=(30, 18), size=6),
            {
                2: {"S(0)->S(0)": 30},
                3: {"S(0)->S(0)": 30, "S(1)->S(1)": 3},
                5: {"S(0)->S(0)": 30},
                6: {"S(0)->S(0)": 30},
            },
        ),
    ],
)
def test_odd_sizes_are_sharded_by_their_factors(
    made: Call, expected: dict[int, dict[str, int]]
) -> None:
    assert {parts: free(made, parts) for parts in expected} == expected


def test_rows_that_are_counted_stay_whole_though_small_shapes_would_have_none_else() -> None:
    made = free(call("first", (4096, 64), out=(4096, 64), count=100))
    assert made == {"S(1)->S(1)": 64}


def test_rows_that_an_operator_counts_for_itself_are_found_nearer_to_the_real_size() -> None:
    made = free(call("prefix", (4096, 64), out=(4096, 64)))
    assert made == {"S(1)->S(1)": 64}


def test_a_product_is_summed_and_its_bias_added_once() -> None:
    rule = found(call("product", (64, 512), (512, 2048), (2048,), out=(64, 2048)))
    options = {str(o) for o in axis_rules(operator_rule(CALL_OF_PRODUCT, rule), 2)}
    assert {"S(1),S(0),P->P", "R,S(1),S(0)->S(1)", "S(0),R,R->S(0)"} <= options
    assert {"P,R,P->P", "R,P,P->P"} <= options
    assert not {"P,R,R->P", "R,R,P->P", "P,P,P->P"} & options


CALL_OF_PRODUCT = call("product", (64, 512), (512, 2048), (2048,), out=(64, 2048))


def test_an_operator_of_one_element_type_is_tried_in_it() -> None:
    made = call("half", (64, 512), out=(64, 512), dtype=DType.BFLOAT16)
    assert probe_of(made).floating is None
    assert free(made) == {"S(0)->S(0)": 64, "S(1)->S(1)": 512}


def program(made: Call) -> Graph:
    """A program of one call."""
    names = [f"v{i}" for i in range(len(made.inputs))]
    made_names = tuple(f"out{i}" for i in range(len(made.outputs)))
    fresh = iter(names)
    arguments = tuple(
        (name, Ref(next(fresh)) if isinstance(value, Ref) else value)
        for name, value in made.arguments
    )
    return Graph(
        inputs=tuple(Input(name, InputKind.USER, name) for name in names),
        nodes=(Node("call", made.operator, arguments, made_names),),
        outputs=(Output("out0"),),
        values=dict(zip((*names, *made_names), (*made.inputs, *made.outputs), strict=True)),
    )


def finding(made: Call) -> Finding:
    (only,) = discover(program(made)).findings
    return only


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        ("picked", "the shapes of its outputs depend on the values"),
        ("writes", "it modifies its inputs in place"),
        ("nothing", "its outputs are always zero"),
        ("fails", "2 dims are not what I want"),
    ],
)
def test_what_cannot_be_tried_is_named(packet: str, reason: str) -> None:
    made = finding(call(packet, (64, 512), out=(64, 512)))
    assert made.rule is None
    assert reason in made.reason


def test_an_operator_that_is_not_registered_is_named() -> None:
    made = replace(call("pairs", (64, 512), out=(64, 256)), operator="elsewhere.pairs.default")
    assert "which torch" in finding(made).reason


@pytest.mark.parametrize(
    ("operator", "attribute", "reason"),
    [
        ("aten._fake_quantize_learnable_per_tensor_affine.default", 2, "internal ATen operators"),
        ("aten.one_hot.default", 1 << 40, "'n' of 1099511627776 may need too much memory"),
        (
            "aten.upsample_bicubic2d.default",
            (1 << 20, 1 << 15),
            "'n' of [1048576, 32768] may need too much memory",
        ),
        ("aten.upsample_bicubic2d.default", (-1 << 11, 0, 1 << 10), "may need too much memory"),
    ],
)
def test_operators_of_torch_that_strangers_could_misuse_are_not_run(
    operator: str,
    attribute: int | tuple[int, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoshard.discovery.program.probe_of", refuse)
    ids = Tensor((64, 512), DType.INT64)
    arguments = (("self", Ref("self")), ("n", attribute))
    assert reason in finding(Call(operator, arguments, (ids,), (ids,))).reason


def test_a_program_gets_no_more_rules_than_it_can_be_read_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoshard.discovery.program.MAX_RULES", 2)
    made = discover(graph_of(custom_operators.mixer()))
    assert [finding.rule is not None for finding in made.findings] == [True, True, False]
    assert made.graph.rules == tuple(finding.rule for finding in made.findings[:2])
    assert made.findings[2].reason == "the program already has 2 rules, which is the limit"
    again = discover(made.graph)
    assert [finding.reason for finding in again.findings] == [made.findings[2].reason]


def test_a_rule_that_could_not_be_read_back_is_none() -> None:
    """It would be refused wherever it is read: every dim that stays whole takes a letter."""
    few, many = (
        replace(one, outputs=one.outputs * n)
        for n in (12, 13)
        for one in [call("copies", (3,), out=(2,) * 5, count=n)]
    )
    assert finding(few).rule is not None
    made = finding(many)
    assert made.rule is None
    assert made.reason.endswith("66 letters are more than the limit of 64")


def test_numbers_of_other_types_make_other_calls() -> None:
    """1, 1.0 and True are equal in Python, and may mean different things to an operator."""
    graph = program(call("pairs", (64, 512), out=(64, 256)))
    (node,), (rule,) = graph.nodes, discover(graph).graph.rules
    kinds = tuple((*rule.arguments, ("n", number)) for number in (1, 1.0, True))
    nodes = tuple(
        replace(node, name=f"call{i}", arguments=(*node.arguments, kind[-1]), outputs=(f"y{i}",))
        for i, kind in enumerate(kinds)
    )
    values = {"v0": graph.values["v0"]} | {f"y{i}": graph.values["out0"] for i in range(3)}
    several = replace(graph, nodes=nodes, outputs=(Output("y0"),), values=values)
    rules = tuple(replace(rule, arguments=kind) for kind in kinds)
    made = with_rules(several, rules)
    assert len(made.rules) == len(rules)
    assert all(made.rule_of(n) is rule for n, rule in zip(made.nodes, rules, strict=True))


def test_random_operators_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'noisy': shardtest.noisy.default draws random"):
        discover(graph_of(custom_operators.noise()))


def test_training_needs_a_gradient() -> None:
    graph = discover(graph_of(custom_operators.clamp())).graph
    assert [rule.differentiable for rule in graph.rules] == [False]
    with pytest.raises(GraphError, match="register one with register_autograd"):
        make_plan(graph, slow_devices(dp=2, tp=2))
    plan = make_plan(graph, slow_devices(dp=2, tp=2), PlanOptions(mode="inference"))
    assert check_plan(plan, graph) == ()


def test_rules_travel_with_the_graph_and_the_plan() -> None:
    graph = graph_of(custom_operators.mixer())
    ruled = public_discover(graph).graph
    assert len(ruled.rules) == 3
    assert public_discover(ruled).findings == ()
    again = graph_from_json(json.loads(json.dumps(graph_to_json(ruled))))
    assert again == ruled
    assert graph_digest(ruled) != graph_digest(graph)
    plan = make_plan(ruled, slow_devices(dp=2, tp=2))
    assert check_plan(plan) == ()
    assert check_plan(plan, ruled) == ()
    assert "the plan was made for another graph" in check_plan(plan, graph)


def test_a_rule_that_is_changed_in_a_plan_is_noticed() -> None:
    ruled = discover(graph_of(custom_operators.mixer())).graph
    plan = make_plan(ruled, slow_devices(dp=2, tp=2))
    document = plan.model_dump(mode="json")
    document["stages"][0]["program"]["rules"][0]["linear"] = []
    changed = type(plan).from_document(document)
    assert any("not the one the plan names" in finding for finding in check_plan(changed))


def test_two_rules_for_one_call_are_refused() -> None:
    rules = rules_to_json(discover(graph_of(custom_operators.mixer())).graph.rules)
    with pytest.raises(SchemaError, match="there are two rules"):
        rules_from_json([*rules, rules[0]])


class Distances(torch.nn.Module):
    """Calls an operator of ATen that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(self.layer(x), x)


def test_what_is_found_for_operators_of_torch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of((Distances(), {"x": torch.randn(32, 16, 64)}))
    store: dict[str, bytes] = {}
    first_time = discover(graph, store=NamespacedCache(Kept(store), "rules"))
    (only,) = first_time.findings
    assert only.rule is not None
    (key,) = store
    with monkeypatch.context() as patched:
        patched.setattr("autoshard.discovery.program.probe_of", refuse)
        assert discover(graph, store=NamespacedCache(Kept(store), "rules")) == first_time
        for damaged in (b"", b"[1]", store[key][:-9], store[key].replace(b"32", b"64")):
            with pytest.raises(RuntimeError, match="tried"):
                discover(graph, store=NamespacedCache(Kept({key: damaged}), "rules"))
    custom: dict[str, bytes] = {}
    assert discover(
        graph_of(custom_operators.mixer()), store=NamespacedCache(Kept(custom), "rules")
    ).findings
    assert custom == {}


class Kept(SolverCache):
    """A cache whose entries can be seen and damaged."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        super().__init__("sqlite://")
        self.entries_by_key = entries
        for key, body in entries.items():
            super().put("rules", key, body)

    def put(self, namespace: str, key: str, body: bytes) -> bool:
        self.entries_by_key[key] = body
        return super().put(namespace, key, body)


def refuse(_: Call) -> None:
    raise RuntimeError("it was tried again")


def test_sizes_shrink_with_their_relations() -> None:
    sizes = smaller_sizes([(16, 4096, 4096), (4096, 11008), (128,)], [64])
    assert sizes[4096] % sizes[128] == 0
    assert sizes[16] < 64 < sizes[128] < sizes[4096] < sizes[11008] < 1000
    assert sizes[128] % 64 == 0
