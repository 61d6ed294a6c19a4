"""Programs of pipeline stages, run one after the other, compute what the whole program does."""

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.evaluation import run_stages
from support.models import Case, bert, gpt2, graph_of, llama, mlp, residuals
from torch import nn
from torch.utils import _pytree as pytree
from transformers import T5Config, T5ForConditionalGeneration

from autoshard.errors import GraphError
from autoshard.graph import Graph, InputKind, StageCutter
from autoshard.planner.pipeline.policies import stage_cutter


def t5() -> Case:
    """An encoder and a decoder: what the encoder makes is used by every layer of the decoder."""
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    ids = torch.randint(1, 64, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return T5ForConditionalGeneration(config), {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids,
    }


class Skips(nn.Module):
    """Convolutions with batch norm, a skip over all of them, and several results.

    Two parameters and a buffer are not used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("ignored", torch.zeros(2))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
        first = hidden = x * self.scale
        mask = (weight > 0).to(x.dtype).cumsum(-1)
        parts = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            hidden = torch.relu(norm(conv(hidden))) * mask + hidden
            parts.append(hidden.mean())
        return {
            "parts": parts,
            "out": hidden * self.scale + first,
            "mask": mask,
            "weight": weight,
            "scale": self.scale,
            "name": "skips",
        }


def skips() -> Case:
    return Skips(), {"x": torch.randn(2, 3, 4, 4), "weight": torch.randn(4)}


class Counting(nn.Module):
    """Buffers that are replaced, counted and returned; noise that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("last", torch.zeros(3, 4))
        self.register_buffer("seen", torch.zeros(3, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.randn(4)
        x = self.layers[0](x) + noise
        x = self.layers[1](x) + self.seen
        self.seen.copy_(x.detach())
        self.calls += 1
        hidden = self.layers[2](nn.functional.dropout(x)) * noise
        self.last.copy_(x.detach() * 2)
        return self.layers[3](hidden), x, self.calls.clone(), noise


def counting() -> Case:
    return Counting(), {"x": torch.randn(3, 4)}


class Functions(nn.Module):
    """A model without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x).cos() * x.exp()


def functions() -> Case:
    return Functions(), {"x": torch.randn(3, 4)}


CASES: tuple[Callable[[], Case], ...] = (
    gpt2,
    bert,
    llama,
    t5,
    skips,
    counting,
    functions,
    residuals,
    mlp,
)


def check(cutter: StageCutter, cuts: list[int], case: Case) -> tuple[Graph, ...]:
    """Cut a program, and compare results, gradients and buffers with the model's."""
    model, user = deepcopy(case[0]).train(), case[1]
    graph = cutter.graph
    stages = cutter.split(cuts)
    assert len(stages) == len(cuts) + 1
    torch.manual_seed(7)
    results, buffers = run_stages(stages, model, pytree.tree_map(lambda x: x, user))
    grads = backward(model, results)
    torch.manual_seed(7)
    same = deepcopy(case[0]).train()
    expected = pytree.tree_leaves(same(**user))
    for actual, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, str):
            assert actual == wanted
        else:
            torch.testing.assert_close(actual, wanted)
    torch.testing.assert_close(grads, backward(same, expected))
    for i in graph.inputs:
        if i.name in graph.updated:
            torch.testing.assert_close(buffers.pop(i.name), same.get_buffer(i.target))
    assert not buffers
    held = {i.target for stage in stages for i in stage.inputs if i.kind in STATE}
    assert held == {i.target for i in graph.inputs if i.kind in STATE}
    return stages


STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)


def backward(model: nn.Module, results: list[Any]) -> dict[str, torch.Tensor | None]:
    """Gradients of parameters for the sum of all results."""
    parts = [r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if parts:
        torch.stack(parts).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.matrix
@pytest.mark.parametrize("build", CASES)
def test_stages_compute_what_the_model_does(build: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    case = build()
    cutter = stage_cutter(graph_of(case))
    places = [point.node for point in cutter.cut_points]
    rng = random.Random(1)
    for stages in (1, 2, 2, 3, 4, 6):
        check(cutter, sorted(rng.sample(places, min(stages - 1, len(places)))), case)
    for place in cutter.placed[1 :: max(1, len(cutter.placed) // 4)]:
        if cutter.cut_point(place) is not None:
            check(cutter, [place], case)


def test_a_tied_parameter_is_held_by_each_stage_that_uses_it() -> None:
    torch.manual_seed(0)
    case = gpt2()
    graph = graph_of(case)
    (tied,) = [i.name for i in graph.parameters if i.aliases]
    numbers = [point.node for point in stage_cutter(graph).cut_points]
    cuts = [numbers[5], numbers[-9]]
    held = check(stage_cutter(graph), cuts, case)
    assert [tied in [i.name for i in part.parameters] for part in held] == [True, False, True]


def test_a_skip_is_passed_on_and_a_mask_is_copied() -> None:
    case = skips()
    cutter = stage_cutter(graph_of(case))
    convs = [i for i, node in enumerate(cutter.graph.nodes) if "conv" in node.operator]
    parts = check(cutter, convs[1:], case)
    first = cutter.graph.nodes[cutter.placed[0]].outputs[0]
    assert all(first in [o.name for o in part.outputs if o.sent] for part in parts[:-1])
    assert all("aten.cumsum.default" in {n.operator for n in part.nodes} for part in parts)
    assert not any(o.name == "cumsum" for part in parts for o in part.outputs if o.sent)
    assert [sum("batch_norm" in n.operator for n in part.nodes) for part in parts] == [1, 1, 1, 1]


def test_reads_and_updates_of_a_buffer_stay_together() -> None:
    graph = graph_of(counting())
    cutter = stage_cutter(graph)
    (buffer,) = [i.name for i in graph.inputs if i.target == "seen"]
    reader = graph.consumers[buffer][0][0]
    (made,) = [o.name for o in graph.outputs if o.updates == buffer]
    assert made is not None
    between = range(reader + 1, graph.makers[made] + 1)
    for node in between:
        assert cutter.cut_point(node) is None
        with pytest.raises(GraphError, match="separates the reads and the update of buffer 'seen'"):
            cutter.split([node])


class Returned(nn.Module):
    """Returns what a buffer had before its update."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[0](x)
        before = self.last.clone()
        self.last.copy_(x.detach()[0])
        return self.layers[2](self.layers[1](x)), before


def test_a_buffer_that_is_returned_before_its_update_stays_in_the_last_stage() -> None:
    case = Returned(), {"x": torch.randn(2, 4)}
    cutter = stage_cutter(graph_of(case))
    (position,) = cutter.graph.updated.values()
    made = cutter.graph.makers[str(cutter.graph.outputs[position].name)]
    for node in cutter.placed[1:]:
        if node > made:
            assert cutter.cut_point(node) is None
        else:
            check(cutter, [node], case)


def test_impossible_cuts_are_refused() -> None:
    cutter = stage_cutter(graph_of(skips()))
    nodes = len(cutter.graph.nodes)
    for cuts in ([0], [3, 2], [4, 4], [nodes], [-1]):
        with pytest.raises(GraphError, match=f"ascending indices of nodes from 1 to {nodes - 1}"):
            cutter.split(cuts)
    assert cutter.cut_point(cutter.placed[0]) is None
    mean = next(
        i for i, node in enumerate(cutter.graph.nodes) if node.operator.startswith("aten.gt")
    )
    with pytest.raises(GraphError, match="stage 1 would have no operator"):
        cutter.split([mean, mean + 1])
    assert cutter.cut_point(nodes) is None


def test_a_program_without_operators_has_one_stage() -> None:
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    case = Same(), {"x": torch.randn(2)}
    cutter = stage_cutter(graph_of(case))
    assert cutter.cut_points == ()
    check(cutter, [], case)
    with pytest.raises(GraphError):
        cutter.split([1])


def test_a_cut_point_says_what_crosses_and_which_layer_begins() -> None:
    cutter = stage_cutter(graph_of(llama(layers=4)))
    layers = [point for point in cutter.cut_points if point.layer is not None]
    assert [point.layer for point in layers] == [0, 1, 2, 3]
    for point in layers:
        parts = cutter.split([point.node])
        sent = [o.name for o in parts[0].outputs if o.sent]
        assert tuple(sent) == point.values
        assert sum(cutter.graph.values[v].nbytes for v in point.values) == point.nbytes
    assert layers[1].module == "model.layers.1.input_layernorm"
