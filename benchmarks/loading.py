"""Loading a Llama of 1.1 billion parameters onto 4 ranks: bytes read, and memory.

Random weights are written as safetensors files in the layout of transformers. Each rank applies the
plan to a model on the meta device, and loads. For each rank this program prints the bytes read,
which must agree with the count of the operating system, and the largest growth of the process. It
compares every slice with that of the `safetensors` package, saves the weights again, compares them
with the original ones, and ends with status 1 if anything is wrong or exceeds its limit.

Run `python -m benchmarks.loading`; it needs Linux, 5 GB of memory and 4.4 GB of disk.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import (
    Plan,
    export_model,
    init_empty_weights,
    load_checkpoint,
    load_graph,
    make_mesh,
    make_plan,
    parallelize,
    save_checkpoint,
)

NUM_RANKS = 4
NUM_FILES = 5
MOST_GROWTH = 1.1
"""Largest growth of a process: this many times its shard, plus one tensor."""

HEADERS = 1 << 20
"""Bytes that may be read in addition to tensors."""

INDEX = "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one rank, in bytes unless noted.

    Attributes:
        read: bytes read, from the report.
        counted: bytes read, from the operating system.
        stored: size of the checkpoint's tensors.
        shard: size of the rank's parameters.
        growth: largest growth of resident memory while loading.
        growth_saving: largest growth of resident memory while saving.
        seconds: of loading.
        differing: number of parameters that differ from the files.
    """

    read: int
    counted: int
    stored: int
    shard: int
    growth: int
    growth_saving: int
    seconds: float
    differing: int


def build(layers: int) -> nn.Module:
    """TinyLlama-1.1B in bfloat16, with a given number of layers."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001  as Auto


def plan_of(layers: int) -> Plan:
    """The plan for training on a node of 4 devices."""
    with torch.device("meta"):
        model = build(layers)
        ids = torch.zeros(NUM_RANKS, 128, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return make_plan(load_graph(export_model(model, (), inputs)), make_mesh((NUM_RANKS,)))


def write_checkpoint(shapes: Shapes, folder: Path) -> None:
    """Write random weights in files of about the same size, with an index."""
    total = sum(prod(shape) for shape in shapes.values())
    groups: list[list[str]] = [[] for _ in range(NUM_FILES)]
    before = 0
    for name, shape in shapes.items():
        groups[before * NUM_FILES // total].append(name)
        before += prod(shape)
    places = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05}-of-{NUM_FILES:05}.safetensors"
        # Random bits, among them NaN: weights are compared bit by bit.
        tensors = {n: torch.randint(-(2**15), 2**15, shapes[n], dtype=torch.int16) for n in names}
        weights = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(weights, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": 2 * total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))


def run_rank(rank: int, plan: Plan, layers: int, folder: Path) -> None:
    """Load on one rank, and write its outcome."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", plan.mesh.axis_sizes, mesh_dim_names=plan.mesh.axis_names)
    with init_empty_weights():
        model = build(layers)
    parallelize(model, plan, mesh)
    before, begin = _begin_peak(), _bytes_read()
    report = load_checkpoint(model, folder)
    growth, counted = _status("VmHWM") - before, _bytes_read() - begin
    before = _begin_peak()
    save_checkpoint(model, folder / "saved", max_file_bytes=500_000_000)
    growth_saving = _status("VmHWM") - before
    parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    outcome = Outcome(
        read=report.bytes_read,
        counted=counted,
        stored=report.bytes_stored,
        shard=sum(parameter.to_local().nbytes for parameter in parameters),
        growth=growth,
        growth_saving=growth_saving,
        seconds=report.seconds,
        differing=sum(1 for _ in _differing(model, folder, rank)),
    )
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(asdict(outcome)))


def _begin_peak() -> int:
    """Reset the peak of resident memory; return the current size."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _differing(model: nn.Module, folder: Path, rank: int) -> Iterator[str]:
    """Names of parameters whose slice differs from that of the `safetensors` package."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().detach()
        with safe_open(folder / places[name], "pt") as file:
            stored = file.get_slice(name)
            (placement,) = parameter.placements
            if not placement.is_shard():
                expected = stored[:]
            elif placement.is_shard(0):
                rows = len(local)
                expected = stored[rank * rows : (rank + 1) * rows]
            else:
                columns = local.shape[1]
                expected = stored[:, rank * columns : (rank + 1) * columns]
            if not torch.equal(local.view(torch.int16), expected.contiguous().view(torch.int16)):
                yield name


def failed_checks(outcome: Outcome, largest: int) -> Iterator[str]:
    """Failed checks of one rank.

    Args:
        outcome: of the rank.
        largest: bytes of the largest tensor.
    """
    if outcome.differing:
        yield f"{outcome.differing} parameters differ from the files"
    if outcome.read != outcome.shard:
        yield f"read {outcome.read} bytes for a shard of {outcome.shard}"
    if not outcome.read <= outcome.counted <= outcome.read + HEADERS:
        yield f"the system counted {outcome.counted} bytes"
    if outcome.growth > MOST_GROWTH * outcome.shard + largest:
        yield f"grew by {outcome.growth} bytes to load"
    if outcome.growth_saving > (MOST_GROWTH - 1) * outcome.shard + largest:
        yield f"grew by {outcome.growth_saving} bytes to save"


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    rows = [
        "| rank | read | of the checkpoint | shard | growth | / shard | growth, saving | loading |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rank, outcome in enumerate(outcomes):
        rows.append(
            f"| {rank} | {outcome.read / 1e6:.1f} MB | {outcome.read / outcome.stored:.2%} | "
            f"{outcome.shard / 1e6:.1f} MB | {outcome.growth / 1e6:.1f} MB | "
            f"{outcome.growth / outcome.shard:.3f} | {outcome.growth_saving / 1e6:.1f} MB | "
            f"{outcome.seconds:.1f} s |"
        )
    return "\n".join(rows)


def main() -> None:
    """Write, load, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=22)
    layers = parser.parse_args().layers
    plan = plan_of(layers)
    shapes = {placed.target: placed.shape for placed in plan.stages[0].parameters}
    with TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.perf_counter()
        write_checkpoint(shapes, folder)
        count = sum(map(prod, shapes.values()))
        print(f"wrote {count:,} parameters in {time.perf_counter() - begin:.1f} s")
        outcomes = launch(plan, layers, folder)
        unequal = [
            n for n in shapes if not torch.equal(_bits(n, folder), _bits(n, folder / "saved"))
        ]
    print(table(outcomes))
    largest = max(2 * prod(shape) for shape in shapes.values())
    found = [
        f"rank {rank}: {failure}"
        for rank, outcome in enumerate(outcomes)
        for failure in failed_checks(outcome, largest)
    ]
    found += [f"{name} differs after saving" for name in unequal]
    print("\n".join(found) or "all checks passed")
    sys.exit(bool(found))


def _bits(name: str, folder: Path) -> torch.Tensor:
    """A whole tensor of a checkpoint, as integers."""
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    with safe_open(folder / places[name], "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor.view(torch.int16)


def launch(plan: Plan, layers: int, folder: Path) -> list[Outcome]:
    """Run the ranks."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(rank, plan, layers, folder))
        for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [
        Outcome(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(NUM_RANKS)
    ]


if __name__ == "__main__":
    main()
