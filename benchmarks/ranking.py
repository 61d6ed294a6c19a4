"""Plans of one model, ranked by what is predicted and by what gloo ranks measure.

    autoshard calibrate --nproc 4 --mesh 2,2 -o topology.json
    python -m benchmarks.ranking topology.json

Writes the table into docs/measured.md. All plans run in turn, round after round, so that what
else the machine does meets all of them alike; medians count.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import (
    Graph,
    Launched,
    Mesh,
    Plan,
    PlanOptions,
    export_model,
    launch,
    load_graph,
    make_mesh,
    make_plan,
)
from autoshard.mesh import topology_from_json
from autoshard.runtime.profiling import MadeUpStep
from benchmarks.document import caption, replace_table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "measured.md"
_ROUNDS = 5

_WEIGHTS = "*proj.weight"
CASES: Mapping[str, Mapping[str, Any]] = {
    "optimal": {},
    "Megatron": {"algo": "megatron", "batch_axis": "dp"},
    "data parallel": {"pins": {"inputs": {"*": "S(0),S(0)"}, "parameters": {"*": "I,I"}}},
    "parameters cut over both axes": {
        "pins": {"inputs": {"*": "S(0),S(0)"}, "parameters": {_WEIGHTS: "S(0),S(0)"}}
    },
    "parameters cut over dp, batch over both": {
        "pins": {"inputs": {"*": "S(0),S(0)"}, "parameters": {_WEIGHTS: "S(0),I"}}
    },
    "batch over dp, all else whole": {
        "pins": {
            "inputs": {"*": "S(0),R"},
            "parameters": {"*": "I,I"},
            "nodes": {"linear*": "S(0),*", "scaled_dot*": "S(0),R"},
        }
    },
    "batch over dp, columns over tp": {
        "pins": {"inputs": {"*": "S(0),R"}, "parameters": {_WEIGHTS: "I,S(0)"}}
    },
    "batch over dp, rows over tp": {
        "pins": {"inputs": {"*": "S(0),R"}, "parameters": {_WEIGHTS: "I,S(1)"}}
    },
    "sequence over tp": {"pins": {"inputs": {"*": "S(0),S(1)"}, "parameters": {"*": "I,I"}}},
    "sequence over both": {"pins": {"inputs": {"*": "S(1),S(1)"}}},
    "linears whole over tp": {"pins": {"nodes": {"linear*": "*,Replicate()"}}},
    "linears whole": {"pins": {"nodes": {"linear*": "Replicate(),Replicate()"}}},
    "linears by columns over both": {"pins": {"nodes": {"linear*": "S(2),S(2)"}}},
    "linears by sequence over tp": {"pins": {"nodes": {"linear*": "*,S(1)"}}},
}


def model_graph(*, hidden: int = 256, batch: int = 8, sequence: int = 128) -> Graph:
    """A small Llama with labels."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=sequence,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    tensors = {"input_ids": ids, "labels": ids, "use_cache": False}
    return load_graph(export_model(model, (), tensors))


def measured(launched: Launched, documents: Sequence[str]) -> list[float]:
    """Median seconds of a step of each plan; of the slowest rank."""
    torch.set_num_threads(1)
    steps = [MadeUpStep(Plan.from_json(text), launched.device_mesh) for text in documents]
    rounds = []
    for number in range(_ROUNDS + 1):
        row = []
        for step in steps:
            dist.barrier()
            start = perf_counter()
            step()
            row.append(perf_counter() - start)
        slowest = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number:
            rounds.append(slowest.tolist())
    return [median(column) for column in zip(*rounds, strict=True)]


def plans_on(mesh: Mesh, graph: Graph) -> dict[str, Plan]:
    """The plans that there are, by what asks for them; none of them twice."""
    found: dict[str, Plan] = {}
    for name, options in CASES.items():
        plan = make_plan(graph, mesh, PlanOptions(optimizer="sgd", **options))
        if plan.found and plan.stages not in [other.stages for other in found.values()]:
            found[name] = plan
    return found


def table(plans: Mapping[str, Plan], seconds: Sequence[float]) -> str:
    """Plans in the order of their predictions, and the rank correlation."""
    rows = [
        (plan.costs.total + plan.costs.hidden, time, name)
        for (name, plan), time in zip(plans.items(), seconds, strict=True)
        if plan.costs is not None
    ]
    correlation = spearmanr([row[0] for row in rows], [row[1] for row in rows]).statistic
    lines = ["| plan | predicted | measured | times as long |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {1e3 * predicted:.1f} ms | {1e3 * time:.1f} ms | {time / predicted:.2f} |"
        for predicted, time, name in sorted(rows)
    ]
    return "\n".join([*lines, "", f"Spearman's rank correlation: **{correlation:.3f}**"])


def main() -> None:
    """Plan, run, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", type=Path)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    topology = topology_from_json(options.topology.read_bytes())
    head = caption(f"medians of {_ROUNDS} rounds, 4 gloo ranks, topology {topology.source}")
    plans = plans_on(make_mesh((2, 2), axes=("dp", "tp"), topology=topology), model_graph())
    seconds = launch(measured, plans["optimal"], ([plan.to_json() for plan in plans.values()],))[0]
    text = f"{head}\n\n{table(plans, seconds)}"
    print(text)
    document = options.document.read_text(encoding="utf-8")
    changed = replace_table(document, "ranking", text)
    options.document.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
