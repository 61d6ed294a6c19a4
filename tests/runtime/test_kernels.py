"""Local operators, with all ranks of a mesh simulated in sequence."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from autoshard.errors import PlanError
from autoshard.graph import Argument, Node, Ref
from autoshard.layouts import Layout
from autoshard.ops import draws_random_numbers
from autoshard.runtime.program.kernels import bind_kernel
from autoshard.runtime.program.local_node import LocalNode, Place
from autoshard.runtime.program.sharded_kernels import experts
from autoshard.runtime.shards import local_shard

SIZES = (2, 2)
RANKS = tuple(product(*map(range, SIZES)))


def local_node(
    node: Node,
    rank: tuple[int, ...],
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
    *,
    seed: int = 0,
) -> LocalNode:
    """A node with layouts and global shapes, each given as layout -> shape pairs."""
    takes = [(Layout.parse(key.split(":")[0]), shape) for key, shape in inputs.items()]
    makes = [(Layout.parse(key.split(":")[0]), shape) for key, shape in outputs.items()]
    return LocalNode(
        node=node,
        inputs=tuple(layout for layout, _ in takes),
        outputs=tuple(layout for layout, _ in makes),
        shapes=tuple(shape for _, shape in takes),
        input_shapes=tuple(layout.local_shape(shape, SIZES) for layout, shape in takes),
        output_shapes=tuple(layout.local_shape(shape, SIZES) for layout, shape in makes),
        place=Place(SIZES, rank, torch.device("cpu"), seed),
    )


def operator(name: str, **arguments: Argument) -> Node:
    given = (("self", Ref("a")), *arguments.items())
    return Node("node", f"aten.{name}", given, ("out",))


def mse_loss(**arguments: Argument) -> Node:
    return operator("mse_loss.default", target=Ref("b"), **arguments)


def embedding(**arguments: Argument) -> Node:
    given = (("weight", Ref("w")), ("indices", Ref("i")), *arguments.items())
    return Node("node", "aten.embedding.default", given, ("out",))


@settings(max_examples=25)
@given(
    layout=st.sampled_from(["S(0),S(0)", "S(0),S(0);1>0", "R,S(0)", "S(0),R"]),
    padding=st.integers(-1, 7),
    ids=st.lists(st.integers(0, 7), min_size=1, max_size=6),
)
def test_vocabulary_parts_add_up(layout: str, padding: int, ids: list[int]) -> None:
    """The sum over the cutting axes is the whole lookup, and so are the rows' gradients."""
    indices = torch.tensor(ids)
    whole = torch.randn(8, 3, dtype=torch.float64).requires_grad_()
    cotangent = torch.randn(len(ids), 3, dtype=torch.float64)
    expected = functional.embedding(indices, whole, padding if padding >= 0 else None)
    expected.backward(cotangent)
    assert whole.grad is not None
    parsed = Layout.parse(layout)
    out = ",".join("P" if t.is_shard else "R" for t in parsed.types)
    cut = [axis for axis, t in enumerate(parsed.types) if t.is_shard]
    total = torch.zeros_like(expected)
    for rank in RANKS:
        rows = local_shard(whole.detach(), parsed, SIZES, rank).clone().requires_grad_()
        node = embedding(padding_idx=padding) if padding >= 0 else embedding()
        local = local_node(node, rank, {layout: (8, 3), "R,R:ids": (len(ids),)}, {out: (1, 3)})
        (part,) = bind_kernel(local)([rows, indices], 0)
        part.backward(cotangent)
        torch.testing.assert_close(rows.grad, local_shard(whole.grad, parsed, SIZES, rank))
        if all(rank[axis] == 0 for axis in range(2) if axis not in cut):
            total += part.detach()
    torch.testing.assert_close(total, expected.detach())


@pytest.mark.parametrize(
    ("node", "layouts", "expected"),
    [
        (operator("mean.dim", dim=(0,)), ("S(0),R", "P,R"), 0.5),
        (operator("mean.default"), ("S(0),S(1)", "P,P"), 0.25),
        (operator("mean.dim", dim=(0,)), ("S(1),R", "S(0),R"), 1.0),
        (operator("mean.dim", dim=(0,)), ("P,R", "P,R"), 1.0),
        (mse_loss(), ("S(0),S(1)", "P,P"), 0.25),
        (mse_loss(reduction=2), ("S(0),S(1)", "P,P"), 4.0),
    ],
)
def test_scaled_means(node: Node, layouts: tuple[str, str], expected: float) -> None:
    """A mean of ones counts as the share of the terms that a rank has; a sum is left alone."""
    takes, makes = layouts
    inputs = {takes: (4, 4)}
    arguments = [torch.ones(Layout.parse(takes).local_shape((4, 4), SIZES))]
    if node.operator == "aten.mse_loss.default":
        inputs[f"{takes}:target"] = (4, 4)
        arguments.append(torch.zeros_like(arguments[0]))
    shape = (4,) if "dim" in dict(node.arguments) else ()
    local = local_node(node, (0, 0), inputs, {makes: shape})
    (result,) = bind_kernel(local)(arguments, 0)
    assert torch.unique(result).tolist() == [expected]


def dropped(
    layout: str, rank: tuple[int, ...], *, step: int = 0, seed: int = 0, name: str = "node"
) -> torch.Tensor:
    arguments = (("input", Ref("x")), ("p", 0.5), ("train", True))
    node = Node(name, "aten.dropout.default", arguments, ("out",))
    local = local_node(node, rank, {layout: (64, 8)}, {layout: (64, 8)}, seed=seed)
    ones = torch.ones(local.input_shapes[0])
    (result,) = bind_kernel(local)([ones], step)
    return result


def test_replicas_draw_the_same_and_slices_do_not() -> None:
    layout = "S(0),R"
    masks = {rank: dropped(layout, rank) for rank in RANKS}
    assert torch.equal(masks[0, 0], masks[0, 1])
    assert torch.equal(masks[1, 0], masks[1, 1])
    assert not torch.equal(masks[0, 0], masks[1, 0])
    assert masks[0, 0].count_nonzero() not in (0, masks[0, 0].numel())


def test_draws_follow_from_seed_step_and_node() -> None:
    first = dropped("R,R", (0, 0))
    assert torch.equal(first, dropped("R,R", (1, 1)))
    for change in ({"step": 1}, {"seed": 1}, {"name": "other"}):
        assert not torch.equal(first, dropped("R,R", (0, 0), **change))


def test_draws_leave_the_callers_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dropped("R,R", (0, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_integers_are_counted_on_a_device_that_counts_none() -> None:
    node = operator("histc.default", bins=4, min=0, max=3)
    local = local_node(node, (0, 0), {"R,R": (6,)}, {"R,R": (4,)})
    (counts,) = bind_kernel(local)([torch.tensor([0, 3, 3, 1, 0, 3], dtype=torch.int32)], 0)
    assert torch.equal(counts, torch.tensor([2, 1, 0, 3], dtype=torch.int32))


def test_tables_of_bags_have_the_shapes_that_were_planned() -> None:
    given = (("weight", Ref("w")), ("indices", Ref("i")), ("offsets", Ref("o")))
    options = (("scale_grad_by_freq", False), ("mode", 0), ("sparse", False))
    rest = (("per_sample_weights", None), ("include_last_offset", False), ("padding_idx", None))
    made = ("sums", "bag", "size", "maximum")
    node = Node("node", "aten.embedding_bag.padding_idx", (*given, *options, *rest), made)
    takes = {"R,S(1)": (8, 4), "R,R:i": (6,), "R,R:o": (3,)}
    makes = {"R,S(1)": (3, 4), "R,R:b": (6,), "R,R:s": (3,), "R,R:m": (0,)}
    inputs = [torch.ones(8, 2), torch.arange(6), torch.tensor([0, 2, 2])]
    sums, *tables = bind_kernel(local_node(node, (0, 1), takes, makes))(inputs, 0)
    assert sums.tolist() == [[2, 2], [0, 0], [4, 4]]
    assert [tuple(table.shape) for table in tables] == [(6,), (3,), (0,)]


def test_attention_without_dropout_draws_nothing() -> None:
    qkv = (("query", Ref("q")), ("key", Ref("k")), ("value", Ref("v")))
    name = "aten.scaled_dot_product_attention.default"
    assert not draws_random_numbers(Node("n", name, qkv, ("o",)))
    assert draws_random_numbers(Node("n", name, (*qkv, ("dropout_p", 0.1)), ("o",)))


def attention(
    rank: tuple[int, int], step: int | torch.Tensor, masks: int, **options: Argument
) -> torch.Tensor:
    """Attention with dropout of this rank's queries, of the second mesh axis."""
    torch.manual_seed(0)
    shapes = [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), (6, 6)][: 3 + masks]
    layouts = ["S(0),S(2)", "S(0),R", "S(0),R", "R,S(0)"]
    wholes = [torch.randn(shape) for shape in shapes]
    names = ("query", "key", "value", "attn_mask")[: len(shapes)]
    given = tuple((name, Ref(name)) for name in names)
    arguments = (*given, ("dropout_p", 0.3), ("enable_gqa", True), *options.items())
    node = Node("node", "aten.scaled_dot_product_attention.default", arguments, ("out",))
    takes = {f"{layout}:{i}": s for i, (layout, s) in enumerate(zip(layouts, shapes, strict=False))}
    local = local_node(node, rank, takes, {"S(0),S(2)": shapes[0]})
    shards = [local_shard(x, y, SIZES, rank) for x, y in zip(wholes, local.inputs, strict=True)]
    (result,) = bind_kernel(local)(shards, step)
    return result


@pytest.mark.parametrize(
    ("masks", "options"), [(0, {}), (1, {}), (0, {"is_causal": True}), (0, {"scale": 0.1})]
)
def test_attention_drops_the_same_weights_while_a_compiler_traces(
    masks: int, options: dict[str, Argument]
) -> None:
    for rank in RANKS:
        expected = attention(rank, 3, masks, **options)
        torch.testing.assert_close(attention(rank, torch.tensor(3), masks, **options), expected)
    other = attention(rank, torch.tensor(4), masks, **options)
    assert not torch.allclose(other, expected)


def test_a_compiler_gets_no_other_random_numbers() -> None:
    node = Node("node", "aten.rand_like.default", (("self", Ref("a")),), ("out",))
    run = bind_kernel(local_node(node, (0, 0), {"R,R": (4,)}, {"R,R": (4,)}))
    with pytest.raises(PlanError, match=r"'node' calls aten.rand_like.default, .* dropout only"):
        run([torch.ones(4)], torch.tensor(0))


def test_sizes_are_the_ranks() -> None:
    reshape = operator("reshape.default", shape=(4, 2, 3))
    local = local_node(reshape, (0, 0), {"S(0),R": (8, 3)}, {"S(0),R": (4, 2, 3)})
    (result,) = bind_kernel(local)([torch.arange(12.0).view(4, 3)], 0)
    assert result.shape == (2, 2, 3)
    zeros = Node("node", "aten.zeros.default", (("size", (4, 8)),), ("out",))
    (made,) = bind_kernel(local_node(zeros, (0, 0), {}, {"S(1),S(0)": (4, 8)}))([], 0)
    assert made.shape == (2, 4)
    expand = operator("expand.default", size=(4, 8))
    local = local_node(expand, (0, 0), {"R,R": (1, 8)}, {"S(0),R": (4, 8)})
    (wide,) = bind_kernel(local)([torch.ones(1, 8)], 0)
    assert wide.shape == (2, 8)


def test_routes_to_experts_of_the_own_rank_are_traced_as_one_graph() -> None:
    """`torch.compile` takes a mixture of experts whose rows stay on their rank."""
    router = experts._Router(4, (), (), SIZES, RANKS[0])
    ids = torch.tensor([[1, 3], [0, 1], [2, 0]])
    traced = torch.compile(
        lambda ids: router.routes(ids).positions, fullgraph=True, backend="eager"
    )
    assert torch.equal(traced(ids), router.routes(ids).positions)
