"""Exporting live models."""

import io
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.errors import ExportError, GraphError, OptionError, UnsupportedError
from autoshard.graph import (
    DType,
    MixedPrecision,
    export_model,
    graph_digest,
    graph_from_json,
    graph_to_json,
    load_graph,
    read_archive,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.spare = nn.Linear(8, 16, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scales = [torch.ones(8), torch.ones(8)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])
        return self.head(self.embed(ids) * self.scales[0]) + positions[:, None]


def test_the_model_is_left_alone() -> None:
    model = Tied().eval()
    before = {name: (p, p.clone(), p._version) for name, p in model.named_parameters()}
    training = {name: m.training for name, m in model.named_modules()}
    ids = torch.zeros(2, 3, dtype=torch.int64)
    export_model(model, (ids,))
    assert ids.device.type == "cpu"
    assert model.head.weight is model.embed.weight
    assert {name: m.training for name, m in model.named_modules()} == training
    for name, parameter in model.named_parameters():
        same, contents, version = before[name]
        assert parameter is same
        assert parameter._version == version
        assert parameter.grad is None
        torch.testing.assert_close(parameter, contents, rtol=0, atol=0)


def test_ties_are_recorded_and_an_unused_twin_is_not_one() -> None:
    archive = export_model(Tied(), (torch.zeros(2, 3, dtype=torch.int64),))
    assert read_archive(archive).export.ties == (("embed.weight", "head.weight"),)
    parameters = load_graph(archive).parameters
    assert {p.target: p.aliases for p in parameters} == {
        "head.weight": ("embed.weight",),
        "spare.weight": (),
    }


def test_meta_weights_and_strict_mode_give_the_same_ties() -> None:
    with torch.device("meta"):
        model = Tied()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    for strict in (False, True):
        graph = load_graph(export_model(model, (ids,), strict=strict))
        (tied,) = [p for p in graph.parameters if p.aliases]
        assert {tied.target, *tied.aliases} == {"embed.weight", "head.weight"}


def test_frozen_parameters_get_no_gradient() -> None:
    model = Tied()
    model.embed.weight.requires_grad_(requires_grad=False)
    with torch.no_grad():
        graph = load_graph(export_model(model, (torch.zeros(2, 3, dtype=torch.int64),)))
    assert {name for name, t in graph.values.items() if t.requires_grad} == {"p_spare_weight"}


def test_training_mode_decides_about_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    for training in (True, False):
        graph = load_graph(export_model(model.train(training), (torch.zeros(2, 4),)))
        operators = [node.operator for node in graph.nodes]
        assert ("aten.dropout.default" in operators) is training


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(x.shape[0] * x.shape[1], x.shape[2])
        return self.linear(flat).view(x.shape[0], x.shape[1], -1)


def test_a_dynamic_export_is_planned_for_its_example_sizes() -> None:
    model = Flattened().to("meta")
    x = torch.zeros(6, 5, 4, device="meta")
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: batch}}, strict=False)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    dynamic = load_graph(buffer.getvalue())
    assert dynamic.dynamic is not None
    planned = replace(dynamic, dynamic=None)
    exported = replace(load_graph(export_model(model, (x,))), model=None)
    assert graph_digest(planned) == graph_digest(exported)


class Autocast(nn.Module):
    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.enabled = enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            return self.linear(x) * 2


def test_autocast_is_refused_where_it_is_on() -> None:
    x = torch.zeros(2, 4)
    graph = load_graph(export_model(Autocast(enabled=False), (x,)))
    assert [n.operator for n in graph.nodes] == ["aten.linear.default", "aten.mul.Tensor"]
    model, buffer = Autocast(enabled=True), io.BytesIO()
    with pytest.raises(ExportError, match=r"with torch.autocast\(.*mixed_precision="):
        export_model(model, (x,))
    torch.export.save(torch.export.export(model, (x,)), buffer)
    with pytest.raises(UnsupportedError, match=r"torch.autocast.*model.to\(torch.bfloat16\)"):
        load_graph(buffer.getvalue())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_around_an_export_is_refused(device: str) -> None:
    with torch.autocast(device), pytest.raises(ExportError, match=r"mixed_precision=.bfloat16"):
        export_model(Tied(), (torch.zeros(2, 3, dtype=torch.int64),))


class Shifted(nn.Module):
    """A tied embedding, an argument, and a buffer that stays in float32."""

    def __init__(self, *, before: bool = False) -> None:
        super().__init__()
        self.before = before
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.ones(8))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + x
        return self.head(x * self.shift) if self.before else self.head(x) * self.shift.sum()


def test_mixed_precision_is_that_of_fsdp2() -> None:
    model = Shifted()
    example = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 8)
    policy = MixedPrecision("bf16", torch.float32, "float64")
    assert MixedPrecision.of(
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    ) == (policy)
    graph = load_graph(export_model(model, example, mixed_precision=policy))
    assert model.head.weight.dtype is torch.float32
    (weight,) = graph.parameters
    assert weight.aliases == ("embed.weight",)
    assert (graph.values[weight.name].dtype, graph.stored_dtype(weight.name)) == (
        DType.BFLOAT16,
        DType.FLOAT32,
    )
    assert graph.reduced_dtype(weight.name) is DType.FLOAT32
    dtypes = {i.target: graph.values[i.name].dtype for i in graph.inputs}
    assert (dtypes["shift"], dtypes["x"]) == (DType.FLOAT32, DType.FLOAT32)
    (result,) = graph.outputs
    assert graph.values[str(result.name)].dtype is DType.FLOAT64
    expected = "bfloat16 compute, float32 parameters, float32 gradient reductions"
    assert graph.precision == expected
    assert graph_from_json(graph_to_json(graph)) == graph


def test_element_types_of_mixed_precision_are_checked() -> None:
    for wrong in ("int8", "bfloat", 16, MixedPrecision):
        with pytest.raises(OptionError, match=r"pass one of bfloat16.*MixedPrecision"):
            MixedPrecision.of(wrong)
    example = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 8)
    with pytest.raises(ExportError, match=r"module 'head' multiplies torch.bfloat16 and torch.fl"):
        export_model(Shifted(before=True), example, mixed_precision="bf16")


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1.0, lambda t: t - 1.0, (x,))


def test_branches_are_refused() -> None:
    archive = export_model(Branches(), (torch.zeros(2, 4),))
    with pytest.raises(UnsupportedError, match="chooses between sub-graphs"):
        load_graph(archive)


class Steep(torch.autograd.Function):
    """Twice its input, with a gradient that says five times."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 5 * gradient


class Climber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Steep.apply(self.linear(x)).sum()


def test_gradients_of_its_own_are_refused() -> None:
    model, x = Climber(), torch.zeros(2, 4)
    with pytest.raises(GraphError, match=r"custom gradients \(.*Steep\).*register_autograd"):
        export_model(model, (x,))
    loss = model(x)
    loss.backward()  # calls are as they were
    assert torch.equal(model.linear.bias.grad, torch.full((4,), 10.0))
    operators = [
        n.operator for n in load_graph(export_model(model.requires_grad_(False), (x,))).nodes
    ]
    assert "aten.mul.Tensor" in operators


def test_a_foreign_archive_ties_only_an_embedding_to_its_unused_twin() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)).to("meta")
    model[1].weight = model[0].weight
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    program = torch.export.export(model, (ids,), strict=False)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    assert read_archive(buffer.getvalue()).export is None
    (weight,) = load_graph(buffer.getvalue()).parameters
    assert (weight.target, weight.aliases) == ("1.weight", ("0.weight",))


def test_reading_graphs_needs_no_torch() -> None:
    code = "import sys, autoshard.graph; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter
