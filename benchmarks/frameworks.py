"""Step times of plans, compared with PyTorch's DistributedDataParallel, FSDP2 and tensor parallel.

    autoshard calibrate --nproc 4 --mesh 4 -o topology.json
    python -m benchmarks.frameworks topology.json

Writes the table into docs/performance.md. `DistributedDataParallel`, `fully_shard` and
`parallelize_module` are applied as in their documentation, and compared with the plan of the same
pattern and with the optimal plan. Each round runs a step of all of them in the same processes, so
that other load of the machine affects all equally; the table has medians of seconds and of ratios.
"""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from autoshard import (
    LaunchContext,
    Mesh,
    Plan,
    PlanOptions,
    export_model,
    launch,
    load_graph,
    make_mesh,
    make_plan,
    parallelize,
)
from autoshard.mesh import topology_from_json
from benchmarks.document import caption, replace_table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "performance.md"
_BATCH, _SEQUENCE = 16, 64
_VOCABULARY = 8192
_TOLERANCE = 1e-3

Step = Callable[[], torch.Tensor]
"""Forward, backward and optimizer of one step; returns the loss, a mean over the whole batch."""

_ROWS = {
    "GPT-2": ("*.attn", "*.mlp", "*.c_*", "*.ln_*", "lm_head"),
    "Llama": ("*.self_attn", "*.mlp", "*_proj", "*norm", "lm_head"),
}
"""Patterns of the modules of each model that are sharded along the batch in data parallelism."""

Pattern = Callable[[str], dict[str, Any]]


def _by_rows(parameters: str, **options: str) -> Pattern:
    """Options that shard the batch, with a given layout of the parameters, by model name."""

    def of(name: str) -> dict[str, Any]:
        nodes = dict.fromkeys(_ROWS[name], "S(0)")
        pins = {"inputs": {"*": "S(0)"}, "parameters": {"*": parameters}, "nodes": nodes}
        return {"pins": pins, **options}

    return of


PATTERNS: Mapping[str, Pattern] = {
    "DistributedDataParallel": _by_rows("I"),
    "fully_shard": _by_rows("S(0)", reshard_after_forward="always"),
    "parallelize_module": lambda _: {"algo": "megatron", "pins": {"inputs": {"*": "R"}}},
}
"""Options that fix the pattern of each framework, by model name."""

CHOSEN = "the optimizer's plan"


def build(name: str) -> nn.Module:
    """A small model with the same weights on every rank."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "Llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=4,
                hidden_size=256,
                intermediate_size=1024,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=_VOCABULARY,
                max_position_embeddings=_SEQUENCE,
            )
        )
        return model
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=4,
            n_embd=256,
            n_head=8,
            n_positions=_SEQUENCE,
            vocab_size=_VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    for block in _blocks(model):
        # parallelize_module supports nn.Linear only.
        mlp = block.get_submodule("mlp")
        for part in ("c_fc", "c_proj"):
            setattr(mlp, part, _linear(mlp.get_submodule(part)))
    return model


def _linear(conv: nn.Module) -> nn.Linear:
    assert isinstance(conv, Conv1D)
    inputs, outputs = conv.weight.shape
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.T)
        linear.bias.copy_(conv.bias)
    return linear


def batch() -> dict[str, Any]:
    """The whole batch."""
    ids = torch.randint(
        _VOCABULARY, (_BATCH, _SEQUENCE), generator=torch.Generator().manual_seed(1)
    )
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def plans_of(name: str, mesh: Mesh) -> dict[str, Plan]:
    """The plan of each pattern, and the optimal plan."""
    with torch.device("meta"):
        model = build(name)
    inputs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch().items()}
    graph = load_graph(export_model(model, (), inputs))
    plans = {
        pattern: make_plan(graph, mesh, PlanOptions.model_validate(options(name)))
        for pattern, options in (*PATTERNS.items(), (CHOSEN, lambda _: {}))
    }
    for pattern, plan in plans.items():
        if not plan.found:
            raise SystemExit(f"{name}: no plan like {pattern}: {plan.reason}")
    return plans


def _rows(rank: int, num_ranks: int) -> dict[str, Any]:
    share = _BATCH // num_ranks
    return {
        name: value[rank * share : (rank + 1) * share] if isinstance(value, torch.Tensor) else value
        for name, value in batch().items()
    }


def _step(model: nn.Module, inputs: Mapping[str, Any], *, mean: bool) -> Step:
    """A step with AdamW in one kernel.

    Args:
        model: runs on this rank.
        inputs: of forward.
        mean: true if each rank's loss is that of its slice of the batch.
    """
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    # A fused optimizer does not support both in one group.
    groups = [group for group in (sharded, plain) if group]
    optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=True) for group in groups]

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def averaged() -> torch.Tensor:
        loss = step()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return averaged if mean else step


def replicated(name: str, _: DeviceMesh) -> Step:
    """`DistributedDataParallel` with its defaults."""
    model = DistributedDataParallel(build(name))
    return _step(model, _rows(dist.get_rank(), dist.get_world_size()), mean=True)


def sharded(name: str, mesh: DeviceMesh) -> Step:
    """`fully_shard` of every block, and of the root module."""
    model = build(name)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step(model, _rows(dist.get_rank(), dist.get_world_size()), mean=True)


def by_columns_and_rows(name: str, mesh: DeviceMesh) -> Step:
    """`parallelize_module` with column- before row-parallel layers, as in Megatron-LM.

    GPT-2 computes queries, keys and values in one product, which no style shards by heads, so its
    attention is replicated.
    """
    model = build(name)
    inner: dict[str, ParallelStyle]
    if name == "Llama":
        columns, rows = ("q_proj", "k_proj", "v_proj"), "o_proj"
        inner = {f"self_attn.{column}": ColwiseParallel() for column in columns}
        inner |= {f"self_attn.{rows}": RowwiseParallel()}
        inner |= {f"mlp.{column}": ColwiseParallel() for column in ("gate_proj", "up_proj")}
        inner |= {"mlp.down_proj": RowwiseParallel()}
        outer: dict[str, ParallelStyle] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
    else:
        inner = {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()}
        outer = {}
    for block in _blocks(model):
        parallelize_module(block, mesh, inner)
    parallelize_module(model, mesh, outer)
    return _step(model, batch(), mean=False)


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    name = "model.layers" if isinstance(model, LlamaForCausalLM) else "transformer.h"
    return list(model.get_submodule(name).children())


FRAMEWORKS: Mapping[str, Callable[[str, DeviceMesh], Step]] = {
    "DistributedDataParallel": replicated,
    "fully_shard": sharded,
    "parallelize_module": by_columns_and_rows,
}


def planned(name: str, mesh: DeviceMesh, plan: Plan) -> Step:
    """`parallelize` with a plan; every rank passes the whole batch."""
    return _step(parallelize(build(name), plan, mesh), batch(), mean=False)


def measured(
    launched: LaunchContext, name: str, documents: Mapping[str, str], rounds: int
) -> list[list[float]]:
    """Seconds of a step on the slowest rank, in each round: of the frameworks, then of the plans.

    Raises:
        RuntimeError: two of them compute different losses.
    """
    torch.set_num_threads(1)
    mesh = launched.device_mesh
    steps = [make(name, mesh) for make in FRAMEWORKS.values()]
    steps += [planned(name, mesh, Plan.from_json(text)) for text in documents.values()]
    found = []
    gc.disable()
    for number in range(rounds + 2):
        row = []
        for step in steps:
            gc.collect()
            dist.barrier()
            start = perf_counter()
            loss = step()
            row.append(perf_counter() - start)
            _compare(row, loss, number)
        slowest = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.tolist())
    return found[2:]


_expected: dict[int, float] = {}


def _compare(row: Sequence[float], loss: torch.Tensor, number: int) -> None:
    expected = _expected.setdefault(number, float(loss))
    if abs(float(loss) - expected) > _TOLERANCE * abs(expected):
        raise RuntimeError(f"step {number} of {len(row)}: loss {float(loss)}, not {expected}")


def table(name: str, rounds: Sequence[Sequence[float]], plans: Mapping[str, Plan]) -> list[str]:
    """Rows: a framework, the plan of its pattern, and the optimal plan, with their ratios."""
    columns = list(zip(*rounds, strict=True))
    hands, planned_times = columns[: len(FRAMEWORKS)], columns[len(FRAMEWORKS) :]
    chosen = planned_times[list(plans).index(CHOSEN)]
    rows = []
    # The optimal plan comes last.
    for hand, pattern, column in zip(hands, plans, planned_times, strict=False):
        cells = [f"{1e3 * median(times):.0f} ms" for times in (hand, column, chosen)]
        ratios = [f"{_ratio(times, hand):.2f}" for times in (column, chosen)]
        rows.append(f"| {name} | {pattern} | {' | '.join(cells)} | {' | '.join(ratios)} |")
    return rows


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of all rounds."""
    return median(one / other for one, other in zip(times, others, strict=True))


def main() -> None:
    """Plan, run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", type=Path)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--models", nargs="+", default=["GPT-2", "Llama"])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    topology = topology_from_json(options.topology.read_bytes())
    head = caption(f"{options.rounds} rounds, 4 gloo ranks, topology {topology.source}")
    mesh = make_mesh((4,), axes=("x",), topology=topology)
    lines = [
        "| model | framework | step | plan of its pattern | optimal plan | ratio | ratio |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in options.models:
        plans = plans_of(name, mesh)
        documents = {pattern: plan.to_json() for pattern, plan in plans.items()}
        rounds = launch(measured, plans[CHOSEN], (name, documents, options.rounds))[0]
        lines += table(name, rounds, plans)
        print("\n".join(lines), flush=True)
    text = "\n".join([head, "", *lines])
    document = options.document.read_text(encoding="utf-8")
    changed = replace_table(document, "frameworks", text)
    options.document.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
