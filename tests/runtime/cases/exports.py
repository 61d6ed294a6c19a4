"""What exports say is done: parameters lie as planned, and numbers are the unsharded model's.

A parameter may lie otherwise only where the export's comment names it.
"""

import copy
import csv
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from support import models
from support.comparison import close, device_mesh
from support.transformer_plans import OPTIONS, planned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers.distributed import DistributedConfig

from autoshard.layouts import I, Layout, to_placements
from autoshard.plan import PlacedInput, Plan, export_plan
from autoshard.runtime.shards import local_shard

Layouts = Mapping[str, Layout]


@dataclass(frozen=True)
class Code:
    """Python that is applied to a model: `parallelize` of one export, then `shard` of another.

    Attributes:
        build: a model with example inputs.
        mesh: name of a mesh.
        options: name of options.
        targets: of exports, in the order in which they are applied.
        arguments: of `parallelize`.
    """

    build: Callable[[], models.Case]
    mesh: str
    options: str
    targets: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...] = ()

    def prepare(self) -> None:
        assert all(self._texts)

    @cached_property
    def _plan(self) -> Plan:
        return planned(self.build, self.mesh, self.options)

    @cached_property
    def _texts(self) -> list[str]:
        return [export_plan(self._plan, target) for target in self.targets]

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        reference = copy.deepcopy(model)
        expected = reference(**inputs).loss
        expected.backward()
        mesh = device_mesh(self._plan)
        for text in self._texts:
            names = run(text)
            if "parallelize" in names:
                model = names["parallelize"](model, mesh, **dict(self.arguments))
            else:
                model = names["shard"](model, mesh)
        # What a gathering module returns is a view of a DTensor; nothing here changes it in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        shared = [self._plan.mesh.axis_names.index(axis) for axis in self._shared]
        loss = model(**rows(inputs, mesh, shared)).loss
        loss.backward()
        check_loss(loss, expected)
        layouts = self._layouts
        if self.targets == TENSOR:
            assert all(isinstance(p, DTensor) for p in model.parameters())
        check_parameters(model, reference, mesh, layouts)
        check_parameters(model, reference, mesh, layouts, gradients=True)
        for trained in (model, reference):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
        check_parameters(model, reference, mesh, layouts)

    @property
    def _shared(self) -> list[str]:
        """Axes whose ranks get rows of their own."""
        text = self._texts[-1]
        if "IS_DATA_PARALLEL = True" in text:
            return re.findall(r"^AXIS = '(\w+)'", text, re.MULTILINE)
        return re.findall(r"^(?:SHARD|REPLICATE)_AXIS = '(\w+)'", text, re.MULTILINE)

    @property
    def _layouts(self) -> Layouts:
        """Where parameters should be: as planned, unless a comment says otherwise."""
        layouts = {}
        for name, placed in parameters(self._plan).items():
            layout = Layout.parse(placed.layout)
            for text in self._texts:
                line = rf"^# - {re.escape(name)}: .* in the plan, (.*) here$"
                other = re.search(line, text, re.MULTILINE)
                layout = Layout.parse(other[1]) if other else layout
            if self.targets == ("parallelize-module",):
                layout = self._on_the_axis(name, layout)
            layouts[name] = layout
        return layouts

    def _on_the_axis(self, name: str, layout: Layout) -> Layout:
        (text,) = self._texts
        for axis, axis_type in enumerate(layout.types):
            line = rf"^# - the sharding over {self._plan.mesh.axis_names[axis]} of ((?:.|\n#   )*)"
            missing = re.search(line, text, re.MULTILINE)
            if axis_type.is_shard and missing:
                assert re.sub(r"\.\d+\.", ".*.", name) in missing[1]
                layout = Layout(tuple(I if a == axis else t for a, t in enumerate(layout.types)))
        return layout


def run(text: str) -> dict[str, Any]:
    """The names that exported Python defines."""
    names: dict[str, Any] = {}
    exec(compile(text, "export.py", "exec"), names)  # noqa: S102  our own export
    return names


def parameters(plan: Plan) -> dict[str, PlacedInput]:
    """Parameters under all of their names."""
    return {n: p for p in plan.stages[0].parameters for n in (p.target, *p.aliases)}


def rows(inputs: dict[str, Any], mesh: DeviceMesh, axes: list[int]) -> dict[str, Any]:
    """The rows of the inputs that this rank has of its own."""
    for axis in axes:
        part, size = mesh.get_local_rank(axis), mesh.size(axis)
        inputs = {
            name: value.chunk(size)[part] if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
    return inputs


def check_loss(loss: torch.Tensor, expected: torch.Tensor) -> None:
    """The ranks' losses are the whole batch's on average."""
    losses = loss.detach().clone()
    dist.all_reduce(losses)
    close(losses / dist.get_world_size(), expected.detach(), "loss")


def check_parameters(
    model: nn.Module,
    reference: nn.Module,
    mesh: DeviceMesh,
    layouts: Layouts,
    *,
    gradients: bool = False,
) -> None:
    """Each rank holds the slices that layouts say, of the values and gradients of a reference."""
    wholes = dict(reference.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    assert set(found) == set(wholes) == set(layouts)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for name, parameter in found.items():
        whole, actual = wholes[name].detach(), parameter.detach()
        if gradients:
            assert parameter.grad is not None, name
            assert wholes[name].grad is not None
            whole, actual = wholes[name].grad, parameter.grad
            if isinstance(actual, DTensor):  # torch leaves those of embeddings as they come
                actual = actual.redistribute(placements=parameter.placements)
        local = actual.to_local() if isinstance(actual, DTensor) else actual
        expected = local_shard(whole, layouts[name], tuple(mesh.shape), coordinate)
        close(local, expected, f"{name} as {layouts[name]}, gradient: {gradients}")


@dataclass(frozen=True)
class Transformers:
    """A model that transformers distributes by an exported `tp_plan`."""

    build: Callable[[], models.Case]
    mesh: str
    options: str

    def prepare(self) -> None:
        assert self._text

    @cached_property
    def _plan(self) -> Plan:
        return planned(self.build, self.mesh, self.options)

    @cached_property
    def _text(self) -> str:
        return export_plan(self._plan, "hf-tp-plan")

    def __call__(self) -> None:
        torch.manual_seed(0)
        reference, inputs = self.build()
        expected = reference(**inputs).loss
        expected.backward()
        names = run(self._text)
        config = DistributedConfig(tp_size=names["TP_SIZE"], tp_plan=names["TP_PLAN"])
        # What from_pretrained does, which needs one more package for its devices.
        model = copy.deepcopy(reference)
        model.zero_grad()
        for placed in self._plan.stages[0].parameters:
            for alias in placed.aliases:  # weights are tied at its end
                model.get_submodule(alias.rpartition(".")[0]).register_parameter(
                    alias.rpartition(".")[2], copy.deepcopy(model.get_parameter(placed.target))
                )
        _, _, manager = model.prepare_distribute_model(config)
        model = model.maybe_distribute_model(model, config, manager)
        model.tie_weights()
        loss = model(**inputs).loss
        loss.backward()
        check_loss(loss, expected)
        line = r"^# - the sharding of ((?:.|\n#   )*), which stay replicated"
        missing = re.search(line, self._text, re.MULTILINE)
        left = re.split(r",\s+(?:#\s+)?", missing[1]) if missing else []
        layouts = {
            name: Layout((I,))
            if re.sub(r"\.\d+\.", ".*.", name) in left
            else Layout.parse(placed.layout)
            for name, placed in parameters(self._plan).items()
        }
        assert any(layout.types[0].is_shard for layout in layouts.values())
        mesh = device_mesh(self._plan)
        check_parameters(model, reference, mesh, layouts)
        check_parameters(model, reference, mesh, layouts, gradients=True)


@dataclass(frozen=True)
class Table:
    """Parameters that are distributed as an exported table says."""

    build: Callable[[], models.Case]
    mesh: str
    options: str
    target: str

    def prepare(self) -> None:
        assert self._rows

    @cached_property
    def _plan(self) -> Plan:
        return planned(self.build, self.mesh, self.options)

    @cached_property
    def _rows(self) -> dict[str, list[str]]:
        text = export_plan(self._plan, self.target)
        if self.target == "json":
            return {name: row["placements"] for name, row in json.loads(text)["tensors"].items()}
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {
            row["name"]: re.findall(r"\w+\([^)]*\)", row["placements"])
            for row in csv.DictReader(lines)
        }

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, _ = self.build()
        mesh = device_mesh(self._plan)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        for placed in self._plan.stages[0].parameters:
            whole = model.get_parameter(placed.target).detach()
            placements = [placement(text) for text in self._rows[placed.target]]
            layout = Layout.parse(placed.layout)
            assert tuple(placements) == to_placements(layout, tuple(mesh.shape))
            if not any(isinstance(p, _StridedShard) for p in placements):
                local = distribute_tensor(whole, mesh, placements).to_local()
                expected = local_shard(whole, layout, tuple(mesh.shape), coordinate)
                close(local, expected, placed.target, 0)


def placement(text: str) -> Placement:
    """DTensor's placement of a text such as `Shard(dim=0)`."""
    name, numbers = text.partition("(")[0], [int(number) for number in re.findall(r"\d+", text)]
    if name == "Replicate":
        return Replicate()
    if name == "Shard":
        return Shard(*numbers)
    assert name == "_StridedShard"
    return _StridedShard(numbers[0], split_factor=numbers[1])


OPTIONS["thirds"] = {
    "pins": {
        "inputs": {"*": "S(0),R"},
        "parameters": {"*.c_attn.weight": "S(0),S(1)/1+1+1", "*.c_fc.weight": "S(1),S(1)"},
    }
}
LOCAL = (("sizes_from_tensors", True),)
TENSOR = ("parallelize-module",)
BOTH = ("parallelize-module", "fsdp2")
llama, gpt2 = partial(models.llama), partial(models.gpt2)

CASES = {
    "tensor parallel llama": Code(llama, "4", "megatron", TENSOR),
    "tensor parallel llama, local heads": Code(llama, "4", "megatron", TENSOR, LOCAL),
    "tensor parallel gpt2, weights gathered": Code(gpt2, "4", "megatron", TENSOR),
    "one axis of a free plan of llama": Code(llama, "2x2", "free", TENSOR, LOCAL),
    "free plan of gpt2, weights gathered": Code(gpt2, "4", "free", TENSOR),
    "weights and rows cut by one axis": Code(gpt2, "4", "fsdp", TENSOR),
    "fsdp of gpt2": Code(gpt2, "4", "fsdp", ("fsdp2",)),
    "fsdp of llama over one of two axes": Code(llama, "2x2", "hsdp", ("fsdp2",)),
    "data and tensor parallel llama": Code(llama, "2x2", "megatron", BOTH, LOCAL),
    "fsdp and a free plan of llama": Code(llama, "2x2", "free", BOTH, LOCAL),
    "fsdp and a free plan of gpt2": Code(gpt2, "2x2", "free", BOTH),
    "fsdp of thirds": Code(gpt2, "2x2", "thirds", BOTH),
    "llama by transformers": Transformers(llama, "4", "megatron"),
    "free plan of llama by transformers": Transformers(llama, "4", "free"),
    "gpt2 by transformers": Transformers(gpt2, "4", "megatron"),
    "json": Table(gpt2, "4", "free", "json"),
    "csv": Table(llama, "2x2", "free", "csv"),
}
