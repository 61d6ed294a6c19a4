"""Rank correlation of predicted and measured step times of one model cut at different places.

    autoshard calibrate --nproc 2 --mesh 2 -o topology.json
    python -m benchmarks.pipeline_ranking topology.json

Writes a row into docs/measured.md, and all plans into benchmarks/results. GPT-2 runs in two stages
on two gloo ranks, cut before each of twelve places, and where the planner cuts it. Each round runs
one step of every plan, so that other load of the machine affects all plans equally; times are
medians of wall times, since ranks wait for each other. The machine needs a free processor for each
rank.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard import (
    LaunchContext,
    Plan,
    PlanOptions,
    export_model,
    launch,
    load_graph,
    make_mesh,
    make_plan,
    pipeline,
)
from autoshard.mesh import topology_from_json
from autoshard.mesh.topology import Topology
from autoshard.planner import cut_names
from autoshard.planner.pipeline.policies import stage_cutter
from benchmarks.document import RESULTS, caption, replace_table
from benchmarks.ranking import HEAD, summary, table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "measured.md"
_ROUNDS = 7
_MICRO_BATCHES = 4
_BATCH, _SEQUENCE, _VOCABULARY = 2, 64, 4096
_NUM_CUTS = 12
CHOSEN = "chosen"


def model() -> nn.Module:
    """A GPT-2 of twelve layers."""
    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_positions=_SEQUENCE,
        n_embd=256,
        n_layer=12,
        n_head=4,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def tokens(micro_batches: int) -> dict[str, Any]:
    """Inputs of a number of micro-batches."""
    shape = (micro_batches * _BATCH, _SEQUENCE)
    ids = torch.arange(shape[0] * shape[1]).reshape(shape) % _VOCABULARY
    return {"input_ids": ids, "labels": ids}


def plans(topology: Topology) -> dict[str, Plan]:
    """The plan that the planner chooses, and those with given cuts, by the first layer after."""
    with torch.device("meta"):
        graph = load_graph(export_model(model(), (), tokens(1)))
    mesh = make_mesh((2,), topology=topology)
    options = PlanOptions(stages=2, schedule="1F1B", micro_batches=_MICRO_BATCHES)
    found = {CHOSEN: make_plan(graph, mesh, options)}
    layers = [point for point in stage_cutter(graph).cut_points if point.layer is not None]
    for point in layers[-_NUM_CUTS:]:
        cut = options.with_values(cuts=cut_names(graph, [point.node]))
        found[f"before layer {point.layer}"] = make_plan(graph, mesh, cut)
    return found


def measured(_: LaunchContext, documents: Sequence[str]) -> list[float]:
    """Median seconds of a step of each plan, on the slowest rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    models = []
    for text in documents:
        torch.manual_seed(0)
        models.append(pipeline(model(), Plan.from_json(text), mesh))
    batch = tokens(_MICRO_BATCHES)
    rounds = [[_seconds(one, batch) for one in models] for _ in range(_ROUNDS + 1)][1:]
    slowest = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [median(slowest[:, i].tolist()) for i in range(len(models))]


def _seconds(one: Any, batch: dict[str, Any]) -> float:
    optimizer = torch.optim.AdamW(one.parameters(), fused=True)
    dist.barrier()
    start = perf_counter()
    one.step(**batch)
    optimizer.step()
    seconds = perf_counter() - start
    optimizer.zero_grad()
    return seconds


def main() -> None:
    """Plan, run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", type=Path)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--details", type=Path, default=RESULTS / "pipeline_ranking.md")
    options = parser.parse_args()
    topology = topology_from_json(options.topology.read_bytes())
    made = plans(topology)
    documents = [plan.to_json() for plan in made.values()]
    seconds = launch(measured, made[CHOSEN], (documents,))[0]
    ratio = seconds[0] / min(seconds[1:])
    head = caption(f"wall time, medians of {_ROUNDS} rounds; topology {topology.source}")
    row = f"{HEAD}\n{summary('GPT-2', made, seconds)}"
    chosen = f"The chosen plan takes {ratio:.3f} times as long as the best other."
    rows = table(made, seconds)
    options.details.write_text(f"{head}\n\n{rows}\n", encoding="utf-8")
    text = f"{head}\n\n{row}\n\n{chosen}"
    print(rows)
    print(text)
    document = options.document.read_text(encoding="utf-8")
    options.document.write_text(replace_table(document, "pipeline ranking", text), encoding="utf-8")


if __name__ == "__main__":
    main()
