"""Exports applied to models: their claims hold, and numbers are the unsharded model's.

Exactly the parameters that an export claims to express have the planned placements.
"""

import copy
import csv
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from support import models
from support.comparison import close, device_mesh
from support.devices import DEVICE
from support.transformer_plans import OPTIONS, planned
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed import DistributedConfig

from autoshard.exports import Expressed, export_plan, expressed_share
from autoshard.layouts import Layout, to_placements
from autoshard.plan import PlacedInput, Plan
from autoshard.runtime.shards import local_shard

Difference = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Code:
    """A model on which exported Python is run: its claims, numbers and collectives.

    Attributes:
        build: a model with example inputs.
        mesh: name of a mesh.
        options: name of options.
        target: of the export.
        arguments: of `parallelize`.
        share: share of the plan that the export should express at least.
        difference: by kind, the number of collectives that run minus that of the plan; None if
            they are not compared.
    """

    build: Callable[[], models.Case]
    mesh: str
    options: str
    target: str
    arguments: tuple[tuple[str, Any], ...] = ()
    share: float = 0.0
    difference: Difference | None = None

    def prepare(self) -> None:
        assert self._text
        assert self._expressed.share >= self.share, self._expressed

    @cached_property
    def _plan(self) -> Plan:
        return planned(self.build, self.mesh, self.options)

    @cached_property
    def _text(self) -> str:
        return export_plan(self._plan, self.target, min_expressed=self.share)

    @cached_property
    def _expressed(self) -> Expressed:
        found = expressed_share(self._plan, self.target)
        assert found is not None
        return found

    def __call__(self) -> None:
        torch.manual_seed(0)
        model, inputs = self.build()
        for parameter in model.parameters():  # those of norms are all equal
            parameter.data += 0.01 * torch.randn_like(parameter)
        reference = copy.deepcopy(model)
        expected = reference(**inputs).loss
        expected.backward()
        mesh = device_mesh(self._plan)
        model.to(DEVICE)
        names = run(self._text)
        if "parallelize" in names:
            model = names["parallelize"](model, mesh, **dict(self.arguments))
        else:
            model = names["shard"](model, mesh)
        # What a gathering module returns is a view of a DTensor; nothing here changes it in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        shared = [self._plan.mesh.axis_names.index(axis) for axis in self._shared]
        with RecordedCollectives() as recorded:
            loss = model(**rows(inputs, mesh, shared)).loss
            loss.backward()
        check_loss(loss, expected)
        check_placements(model, reference, mesh, self._plan, self._expressed)
        check_values(model, reference)
        check_values(model, reference, gradients=True)
        for trained in (model, reference):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
        check_values(model, reference)
        check_collectives(recorded.counts, self._plan, self.difference)

    @property
    def _shared(self) -> list[str]:
        """Axes whose ranks get rows of their own."""
        return re.findall(r"^(?:SHARD|REPLICATE)_AXIS = '(\w+)'", self._text, re.MULTILINE)


class RecordedCollectives(TorchDispatchMode):
    """Counts the collectives that this process runs, by kind."""

    NAMES: ClassVar = {
        "allgather": "all_gather",
        "all_gather": "all_gather",
        "allreduce": "all_reduce",
        "all_reduce": "all_reduce",
        "reduce_scatter": "reduce_scatter",
        "alltoall": "all_to_all",
        "all_to_all": "all_to_all",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its collectives follow
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = func._schema.name.partition("::")[2].lstrip("_")
            kind = next((k for n, k in self.NAMES.items() if name.startswith(n)), "")
            if kind:
                self.counts[kind] += 1
        return func(*args, **(kwargs or {}))


def in_plan(plan: Plan) -> "Counter[str]":
    """The number of collectives of a step of a plan, by kind."""
    counts: Counter[str] = Counter()
    for collective in plan.collectives:
        counts[collective.kind] += collective.count
    return counts


def check_collectives(ran: "Counter[str]", plan: Plan, difference: Difference | None) -> None:
    """The collectives that ran differ from those of the plan as stated."""
    if difference is not None:
        expected = in_plan(plan)
        expected.update(dict(difference))
        assert ran == expected, f"{dict(ran)}, not {dict(expected)}"


def check_placements(
    model: nn.Module, reference: nn.Module, mesh: DeviceMesh, plan: Plan, expressed: Expressed
) -> None:
    """Exactly the parameters that the export claims to place as planned are so on all ranks."""
    wholes = dict(reference.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    placed = parameters(plan)
    assert set(found) == set(wholes) == set(placed)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    as_planned = torch.zeros(len(found), dtype=torch.int64)
    for number, name in enumerate(found):
        layout = Layout.parse(placed[name].layout)
        shard = local_shard(wholes[name].detach(), layout, tuple(mesh.shape), coordinate)
        local = local_of(found[name].detach())
        as_planned[number] = local.shape == shard.shape and bool(torch.equal(local.cpu(), shard))
    dist.all_reduce(as_planned, dist.ReduceOp.MIN)
    claimed = [name for name, same in zip(found, as_planned.tolist(), strict=True) if same]
    assert set(claimed) == expressed.parameters


def check_values(model: nn.Module, reference: nn.Module, *, gradients: bool = False) -> None:
    """The full parameters, or their gradients, are those of a reference."""
    wholes = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected, actual = wholes[name].detach(), parameter.detach()
        if gradients:
            assert parameter.grad is not None, name
            assert wholes[name].grad is not None
            expected, actual = wholes[name].grad, parameter.grad
        full = actual.full_tensor() if isinstance(actual, DTensor) else actual
        close(full, expected, f"{name}, gradient: {gradients}")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that a rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(text: str) -> dict[str, Any]:
    """The names that exported Python defines."""
    names: dict[str, Any] = {}
    exec(compile(text, "export.py", "exec"), names)  # noqa: S102  our own export
    return names


def parameters(plan: Plan) -> dict[str, PlacedInput]:
    """Parameters under all of their names."""
    return {n: p for p in plan.stages[0].parameters for n in (p.target, *p.aliases)}


def rows(inputs: dict[str, Any], mesh: DeviceMesh, axes: list[int]) -> dict[str, Any]:
    """The rows of the inputs that this rank has of its own, on its device."""
    inputs = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
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


@dataclass(frozen=True)
class Transformers:
    """A model that transformers distributes by an exported `tp_plan`."""

    build: Callable[[], models.Case]
    mesh: str
    options: str
    share: float = 0.0
    difference: Difference | None = None

    def prepare(self) -> None:
        assert self._text
        assert self._expressed.share >= self.share, self._expressed

    @cached_property
    def _plan(self) -> Plan:
        return planned(self.build, self.mesh, self.options)

    @cached_property
    def _text(self) -> str:
        return export_plan(self._plan, "hf-tp-plan", min_expressed=self.share)

    @cached_property
    def _expressed(self) -> Expressed:
        found = expressed_share(self._plan, "hf-tp-plan")
        assert found is not None
        return found

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
        with RecordedCollectives() as recorded:
            loss = model(**inputs).loss
            loss.backward()
        check_loss(loss, expected)
        check_placements(model, reference, device_mesh(self._plan), self._plan, self._expressed)
        check_values(model, reference)
        check_values(model, reference, gradients=True)
        check_collectives(recorded.counts, self._plan, self.difference)


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
for target in ("fsdp2", "parallelize-module", "hf-tp-plan"):
    OPTIONS[f"for {target}"] = {"exportable_to": target}
LOCAL = (("sizes_from_tensors", True),)
TENSOR = "parallelize-module"
LOSS = ("all_reduce", -2)
"""The plan's loss is reduced over the ranks, in two collectives; with FSDP2 each has its own."""
GROUPS = (("all_gather", 2), ("reduce_scatter", 2))
"""FSDP2 gathers two blocks and the rest apart; the plan has one bucket for these few bytes."""
REPLICAS = ("all_reduce", 2 + LOSS[1])
"""FSDP2 also reduces two blocks and the rest apart over the replicas, but no loss."""
READERS = ("all_reduce", 6)
"""In the backward of two layers: query, key and value, or gate and up, reduce the gradient of what
they read one by one; in the plan their sum is reduced."""
llama, gpt2 = partial(models.llama), partial(models.gpt2)

CASES = {
    "llama for fsdp2": Code(llama, "4", "for fsdp2", "fsdp2", (), 1.0, (*GROUPS, LOSS)),
    "gpt2 for fsdp2": Code(gpt2, "4", "for fsdp2", "fsdp2", (), 1.0, (*GROUPS, LOSS)),
    "llama for fsdp2, two axes": Code(
        llama, "2x2", "for fsdp2", "fsdp2", (), 1.0, (*GROUPS, REPLICAS)
    ),
    "llama for parallelize_module": Code(
        llama, "4", f"for {TENSOR}", TENSOR, LOCAL, 1.0, (READERS,)
    ),
    "gpt2 for parallelize_module": Code(gpt2, "4", f"for {TENSOR}", TENSOR, (), 1.0, ()),
    "llama for both": Code(
        llama, "2x2", f"for {TENSOR}", TENSOR, LOCAL, 1.0, (*GROUPS, ("all_reduce", 4))
    ),
    "gpt2 for both": Code(gpt2, "2x2", f"for {TENSOR}", TENSOR, (), 1.0, (LOSS,)),
    "llama for transformers": Transformers(llama, "4", "for hf-tp-plan", 1.0, (READERS,)),
    "gpt2 for transformers": Transformers(gpt2, "4", "for hf-tp-plan", 1.0, ()),
    "tensor parallel llama": Code(llama, "tp=4", "megatron", TENSOR),
    "tensor parallel llama, local heads": Code(llama, "tp=4", "megatron", TENSOR, LOCAL),
    "tensor parallel gpt2, weights gathered": Code(gpt2, "tp=4", "megatron", TENSOR),
    "free plan of gpt2, weights gathered": Code(gpt2, "4", "free", TENSOR),
    "fsdp of gpt2": Code(gpt2, "4", "fsdp", "fsdp2"),
    "fsdp of llama over one of two axes": Code(llama, "2x2", "hsdp", "fsdp2"),
    "data and tensor parallel llama": Code(llama, "2x2", "megatron", TENSOR, LOCAL),
    "data parallel half of llama": Code(llama, "2x2", "megatron", "fsdp2"),
    "fsdp and a free plan of llama": Code(llama, "2x2", "free", TENSOR, LOCAL),
    "fsdp and a free plan of gpt2": Code(gpt2, "2x2", "free", TENSOR),
    "fsdp of thirds": Code(gpt2, "2x2", "thirds", TENSOR),
    "llama by transformers": Transformers(llama, "tp=4", "megatron"),
    "free plan of llama by transformers": Transformers(llama, "4", "free"),
    "gpt2 by transformers": Transformers(gpt2, "tp=4", "megatron"),
    "json": Table(gpt2, "4", "free", "json"),
    "csv": Table(llama, "2x2", "free", "csv"),
}
LONG = (
    "gpt2 for fsdp2",
    "gpt2 for both",
    "gpt2 for transformers",
    "tensor parallel llama",
    "fsdp and a free plan of gpt2",
    "gpt2 by transformers",
    "llama for fsdp2",
    "gpt2 for parallelize_module",
    "llama for both",
    "tensor parallel gpt2, weights gathered",
    "fsdp of gpt2",
    "fsdp and a free plan of llama",
    "llama by transformers",
    "csv",
)
"""Each kind of code, plan and model is in one of the others."""
