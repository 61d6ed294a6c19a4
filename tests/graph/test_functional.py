"""In-place writes and views, compared with PyTorch."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.errors import UnsupportedError
from autoshard.graph import Graph, Node, Ref, export_model, load_graph
from autoshard.graph.normalise.out_arguments import functional_overload
from autoshard.torch_private import operator_names, schema_of

Check = Callable[..., Graph]
Forward = Callable[[torch.Tensor], object]


class Calls(nn.Module):
    """A model that is one function."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def concatenate(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(4, 10)
    whole[:, :6] = x
    whole[:, 6:] = x[:, :4]
    return whole


def shift_right(x: torch.Tensor) -> torch.Tensor:
    shifted = x.new_zeros(x.shape)
    shifted[..., 1:] = x[..., :-1].clone()
    shifted[..., 0] = 7
    return shifted.masked_fill_(shifted < 0, 0.5)


def write_through_views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    base = x.clone()
    rows, turned = base[1:3], base.t()
    turned[2:4].mul_(3.0)
    left, _ = base.split([2, 4], dim=1)
    left.add_(rows.sum())
    base.view(-1).unsqueeze(0).neg_()
    first, *_ = base.unbind(0)
    first.zero_()
    base.permute(1, 0).unflatten(0, (2, 3))[1, 0].fill_(2.0)
    return base, rows, turned, left, first


def cast_and_broadcast(x: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(4, 6, dtype=torch.int64)
    counts[1] = x[0] * 10
    counts.copy_(counts + counts[1])
    return counts.div(2)


def scatters(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = x.argsort(1)
    inverse = torch.empty_like(order)
    inverse.scatter_(1, order, torch.arange(6).expand(4, 6))
    taken = torch.zeros(6, dtype=x.dtype)
    taken.index_put_((order[0],), x[0])
    taken.index_add_(0, order[1], x[1])
    return inverse, taken


def user_input(x: torch.Tensor) -> torch.Tensor:
    x.sub_(1.0).clamp_(min=-0.5)
    return x * 2


def dropout_view(x: torch.Tensor) -> torch.Tensor:
    same = nn.functional.dropout(x.clone(), 0.5, training=False)
    also = same.to(torch.float32)
    also.exp_()
    return same


@pytest.mark.parametrize(
    "function",
    [
        concatenate,
        shift_right,
        write_through_views,
        cast_and_broadcast,
        scatters,
        user_input,
        dropout_view,
    ],
)
def test_writes_give_what_pytorch_gives(function: Forward, check_equal: Check) -> None:
    torch.manual_seed(0)
    graph = check_equal(Calls(function), x=torch.randn(4, 6))
    packets = {node.operator.split(".")[1] for node in graph.nodes}
    assert not {packet for packet in packets if packet.endswith("_")}


def test_a_tensor_written_in_parts_is_one_concatenation(check_equal: Check) -> None:
    graph = check_equal(Calls(concatenate), x=torch.randn(4, 6))
    assert [node.operator for node in graph.nodes] == ["aten.slice.Tensor", "aten.cat.default"]


def stale_reshape(x: torch.Tensor) -> torch.Tensor:
    flat = x.t().reshape(-1)
    x.t().add_(1.0)
    return flat


def every_other(x: torch.Tensor) -> torch.Tensor:
    base = x.clone()
    base[:, ::2].add_(1.0)
    return base


def mixed_types(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).add_(x)


def truth_values(x: torch.Tensor) -> torch.Tensor:
    return x.clone().ge_(0.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (stale_reshape, "may share memory with what 'add_' has overwritten"),
        (every_other, "every other element"),
        (mixed_types, "writes float32 into bfloat16"),
        (truth_values, "no functional form"),
    ],
)
def test_what_cannot_be_carried_through_is_refused(function: Forward, message: str) -> None:
    archive = export_model(Calls(function), (torch.randn(4, 6),))
    with pytest.raises(UnsupportedError, match=message):
        load_graph(archive)


class State(nn.Module):
    """Buffers that forward writes into, as a whole, in parts and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_first", torch.ones((), dtype=torch.bool))
        self.register_buffer("queue", torch.randn(8, 6))
        self.register_buffer("untouched", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.is_first.fill_(False)
            self.queue = torch.cat([self.queue[4:], x])
            self.queue[0].zero_()
            self.queue.t()[1:3].add_(1.0)
            self.untouched.detach_()
        return (x - self.mean) * self.calls + self.queue.sum() + self.untouched


def test_what_is_written_into_buffers_leaves_the_program(check_equal: Check) -> None:
    graph = check_equal(State(), x=torch.randn(4, 6))
    updated = {i.target for i in graph.inputs if i.name in graph.updated}
    assert updated == {"mean", "calls", "is_first", "queue"}
    assert all(output.updates for output in graph.outputs[graph.num_results :])


class Previous(nn.Module):
    """Returns buffers as they were before assignments, and one that is written into."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("last", "first", "seen"):
            self.register_buffer(name, torch.arange(4.0))
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + self.shift
        before, self.last = self.last, x.detach()[0]
        part = self.first[1:]
        self.first = self.first + before
        self.seen.add_(1)
        return x, before, part, self.first, self.last, self.seen


def test_results_keep_what_a_buffer_had_before_an_assignment(check_equal: Check) -> None:
    graph = check_equal(Previous(), x=torch.randn(2, 4))
    assert len(graph.updated) == 3


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.lerp_(x.mean(0), 0.1)
        return x * self.weight


def test_writing_into_a_parameter_is_refused() -> None:
    archive = export_model(Teacher(), (torch.randn(4, 6),))
    with pytest.raises(
        UnsupportedError, match=r"overwrites the parameter 'weight'.* register_buffer"
    ):
        load_graph(archive)


VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t.transpose(0, -1),
    lambda t: t[1:],
    lambda t: t[..., :-1],
    lambda t: t.unsqueeze(0),
    lambda t: t.squeeze(0),
    lambda t: t.flip(0),
    lambda t: t.clone(),
    lambda t: t.chunk(2, dim=-1)[0],
    lambda t: t[0] if t.ndim > 1 else t[:1],
)
WRITES: tuple[Callable[[torch.Tensor, torch.Tensor], object], ...] = (
    lambda t, _: t.mul_(2.0),
    lambda t, _: t.fill_(1.0),
    lambda t, _: t.relu_(),
    lambda t, other: t.add_(other.sum()),
    lambda t, other: t.copy_(other.mean()),
    lambda t, _: t.zero_(),
)
INSTRUCTIONS = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans(), st.integers(0, 99)),
    min_size=2,
    max_size=8,
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(instructions=INSTRUCTIONS)
def test_any_mix_of_views_and_writes_gives_what_pytorch_gives(
    check_equal: Check, instructions: list[tuple[int, int, bool, int]]
) -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        pool = [x.clone()]
        for which, what, writes, other in instructions:
            tensor = pool[which % len(pool)]
            if writes:
                WRITES[what % len(WRITES)](tensor, pool[other % len(pool)])
            elif tensor.ndim and min(tensor.shape) > 1:
                pool.append(VIEWS[what % len(VIEWS)](tensor))
        return pool

    check_equal(Calls(forward), x=torch.arange(24.0).view(2, 3, 4) - 9)


def test_out_arguments_have_the_overloads_of_torch() -> None:
    """Every operator of torch with `out` arguments has its functional overload, or is left."""
    left = set()
    names = (name.partition("::") for name in operator_names())
    for packet in sorted({name.partition(".")[0] for space, _, name in names if space == "aten"}):
        overloads = getattr(torch.ops.aten, packet).overloads()
        for overload in overloads:
            schema = schema_of(getattr(getattr(torch.ops.aten, packet), overload))
            outs = [x.name for x in schema.arguments if x.is_out]
            wanted = {x.name for x in schema.arguments if not x.is_out}
            arguments = tuple((name, Ref(name)) for name in outs)
            call = Node("call", f"aten.{packet}.{overload}", arguments, tuple(outs))
            form = functional_overload(call)
            if not outs or packet.startswith("_"):
                continue
            if form is None or len(form[1]) < len(outs):
                left.add(packet)  # refused
                continue
            functional = form[0].split(".")[2]
            if functional not in overloads:
                left.add(packet)  # refused when a call is checked
                continue
            found = schema_of(getattr(getattr(torch.ops.aten, packet), functional)).arguments
            assert list(form[1]) == outs
            assert wanted <= {x.name for x in found}
            assert {x.name for x in found if not x.has_default_value()} <= wanted
    common = "add all any arange div eye matmul max mean min mul sort sub sum topk where xlogy"
    assert left.isdisjoint(common.split())
