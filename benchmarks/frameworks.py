"""Step times of plans, compared with PyTorch's DistributedDataParallel, FSDP2 and tensor parallel.

    autoshard calibrate --nproc 4 --mesh 4 -o topology.json
    python -m benchmarks.frameworks topology.json

Writes the table into docs/performance.md. `DistributedDataParallel`, `fully_shard` and
`parallelize_module` are applied as in their documentation, and compared with the plan of the same
pattern and with the optimal plan. Each round runs a step of all of them in the same processes, so
that other load of the machine affects all equally; the table has medians of seconds and of ratios.
`benchmarks.gpu` runs the same on ranks that share a GPU.
"""

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autoshard import (
    LaunchContext,
    Plan,
    export_model,
    launch,
    load_graph,
    make_mesh,
    make_plan,
    parallelize,
)
from autoshard.exports import read_like
from autoshard.mesh import Topology, topology_from_json
from benchmarks.document import DOCS, caption, write_table
from benchmarks.plain_models import Gpt2, Inputs, Llama, PlainModel, Sizes

_DOCUMENT = DOCS / "performance.md"
_NUM_RANKS = 4

Step = Callable[[], torch.Tensor]
"""Forward, backward and optimizer; returns the loss of the rows that this rank has."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A way to train on four ranks.

    Attributes:
        pattern: the layouts of its plan, in the words of `read_like`. An axis `dp` divides the
            batch.
        apply: prepares a model on a mesh with the axes of the pattern.
    """

    pattern: str
    apply: Callable[[nn.Module, DeviceMesh], nn.Module]


def _replicated(model: nn.Module, _: DeviceMesh) -> nn.Module:
    """`DistributedDataParallel` with its defaults."""
    return DistributedDataParallel(model)


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`fully_shard` of every block, and of the root module."""
    for block in _blocks(model):
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _by_columns_and_rows(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`parallelize_module` with column- before row-parallel layers, as in Megatron-LM.

    No style shards a product of queries, keys and values by heads, so the attention of GPT-2 is
    replicated; nor a weight that two modules have, so embeddings and logits are.
    """
    for block in _blocks(model):
        parallelize_module(block, mesh["tp"], _STYLES[type(model)])
    return model


_STYLES: Mapping[type[nn.Module], dict[str, ParallelStyle]] = {
    Gpt2: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    Llama: {
        "attention.[qkv]": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    },
}


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


FRAMEWORKS: Mapping[str, Framework] = {
    "DistributedDataParallel": Framework("ddp", _replicated),
    "fully_shard": Framework("fsdp2", _sharded),
    "parallelize_module": Framework("megatron tp=4", _by_columns_and_rows),
    "parallelize_module and fully_shard": Framework(
        "megatron tp=2 fsdp", lambda model, mesh: _sharded(_by_columns_and_rows(model, mesh), mesh)
    ),
}

CHOSEN = "the optimizer's plan"

PLANNED = ", planned"
"""Behind the name of a framework: the plan of its pattern."""

MODELS: Mapping[str, PlainModel] = {
    name: PlainModel(make, Sizes(4, 256, 8, 1024, 8192, 64), 16, torch.float32)
    for name, make in (("GPT-2", Gpt2), ("Llama", Llama))
}
"""Small models of 4 layers."""


def plans_of(model: PlainModel, topology: Topology | str) -> dict[str, Plan]:
    """The plan of each framework's pattern, and the optimal plan on one axis."""
    graph = load_graph(export_model(*model.export_arguments()))
    plans = {}
    for name, framework in FRAMEWORKS.items():
        like = read_like(framework.pattern, num_ranks=_NUM_RANKS)
        axes, sizes = zip(*like.axes, strict=True)
        mesh = make_mesh(sizes, axes=axes, topology=topology)
        plans[name] = make_plan(graph, mesh, like.options)
    plans[CHOSEN] = make_plan(graph, make_mesh((_NUM_RANKS,), axes=("dp",), topology=topology))
    for name, plan in plans.items():
        if not plan.found:
            raise SystemExit(f"no plan like {name}: {plan.reason}")
    return plans


def steps_of(
    model: PlainModel, plans: Mapping[str, Plan], device: torch.device
) -> Iterator[tuple[str, DeviceMesh, Callable[[], Step]]]:
    """What runs on this rank: a name, the mesh, and a function that builds the step.

    Frameworks come first, then the plans of their patterns, then the optimal plan. Every rank
    passes the whole batch to a plan, and its rows to a framework.
    """
    for name, framework in FRAMEWORKS.items():
        mesh = mesh_of(plans[name], device.type)

        def by_hand(framework: Framework = framework, mesh: DeviceMesh = mesh) -> Step:
            applied = framework.apply(model.build(device), mesh)
            return _step(applied, _own_rows(model.inputs(device), mesh))

        yield name, mesh, by_hand
    for name, plan in plans.items():
        mesh = mesh_of(plan, device.type)

        def planned(plan: Plan = plan, mesh: DeviceMesh = mesh) -> Step:
            return _step(parallelize(model.build(device), plan, mesh), model.inputs(device))

        yield name if name == CHOSEN else f"{name}{PLANNED}", mesh, planned


@cache
def _mesh(device: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def mesh_of(plan: Plan, device: str) -> DeviceMesh:
    """The process groups of a plan; plans with the same axes share them."""
    return _mesh(device, tuple(plan.mesh.axis_sizes), tuple(plan.mesh.axis_names))


def _own_rows(inputs: Inputs, mesh: DeviceMesh) -> Inputs:
    """The rows of this rank: an axis `dp` divides the batch."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        return inputs
    parts, own = mesh["dp"].size(), mesh["dp"].get_local_rank()
    return {name: tensor.chunk(parts)[own] for name, tensor in inputs.items()}


def _step(model: nn.Module, inputs: Inputs) -> Step:
    """A step with AdamW in one kernel."""
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # A fused optimizer takes tensors of one kind and one mesh.
    meshes = {parameter.device_mesh for parameter in sharded}
    groups = [[p for p in sharded if p.device_mesh == mesh] for mesh in meshes]
    optimizers = [
        torch.optim.AdamW(group, lr=1e-4, fused=True) for group in (*groups, plain) if group
    ]

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**inputs)
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of the losses of all ranks: that of the whole batch."""
    total = loss.clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def check_losses(losses: Mapping[str, float], tolerance: float) -> None:
    """Check that all compute the same.

    Raises:
        RuntimeError: two of them have different losses.
    """
    expected = next(iter(losses.values()))
    for name, loss in losses.items():
        if abs(loss - expected) > tolerance * abs(expected):
            raise RuntimeError(f"{name}: loss {loss}, not {expected}")


def measured(
    context: LaunchContext, model: str, documents: Mapping[str, str], rounds: int
) -> list[list[float]]:
    """Seconds of a step on the slowest rank, in each round: of the frameworks, then of the plans.

    Raises:
        RuntimeError: two of them compute different losses.
    """
    torch.set_num_threads(1)
    plans = {name: Plan.from_json(text) for name, text in documents.items()}
    steps = {name: build() for name, _, build in steps_of(MODELS[model], plans, context.device)}
    found = []
    gc.disable()
    for _ in range(rounds + 2):
        row, losses = [], {}
        for name, step in steps.items():
            gc.collect()
            dist.barrier()
            start = perf_counter()
            loss = step()
            row.append(perf_counter() - start)
            losses[name] = mean_over_ranks(loss)
        check_losses(losses, 1e-3)
        slowest = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.tolist())
    return found[2:]


def table(name: str, rounds: Sequence[Sequence[float]]) -> list[str]:
    """Rows: a framework, the plan of its pattern, and the optimal plan, with their ratios."""
    columns = list(zip(*rounds, strict=True))
    by_hand, planned, chosen = (
        columns[: len(FRAMEWORKS)],
        columns[len(FRAMEWORKS) : -1],
        columns[-1],
    )
    rows = []
    for framework, hand, column in zip(FRAMEWORKS, by_hand, planned, strict=True):
        cells = [f"{1e3 * median(times):.0f} ms" for times in (hand, column, chosen)]
        ratios = [f"{_ratio(times, hand):.2f}" for times in (column, chosen)]
        rows.append(f"| {name} | {framework} | {' | '.join(cells)} | {' | '.join(ratios)} |")
    return rows


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of all rounds."""
    return median(one / other for one, other in zip(times, others, strict=True))


def main() -> None:
    """Plan, run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", type=Path)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    topology = topology_from_json(options.topology.read_bytes())
    head = caption(f"{options.rounds} rounds, 4 gloo ranks, topology {topology.source}")
    lines = [
        "| model | framework | step | plan of its pattern | optimal plan | ratio | ratio |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in options.models:
        plans = plans_of(MODELS[name], topology)
        documents = {pattern: plan.to_json() for pattern, plan in plans.items()}
        rounds = launch(measured, plans[CHOSEN], (name, documents, options.rounds))[0]
        lines += table(name, rounds)
        print("\n".join(lines), flush=True)
    text = "\n".join([head, "", *lines])
    write_table(options.document, "frameworks", text)


if __name__ == "__main__":
    main()
