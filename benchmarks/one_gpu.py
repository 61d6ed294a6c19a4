"""Predicted and measured training steps on one GPU: time and peak memory.

    python -m benchmarks.one_gpu --topology h100-sxm --json steps.json
    python -m benchmarks.one_gpu --table steps.json

The first command runs on a machine with a GPU, the second writes its results into
docs/measured.md. Every model trains in bfloat16 with AdamW: as it is written, with and without
`torch.compile`, and as planned for one device, with gradients and optimizer states as large as the
parameters. One device has no collectives, so this compares compute, memory and what the runtime
adds with the cost model.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from autoshard import LaunchContext, Plan, PlanOptions, launch, load_graph, make_mesh, make_plan
from autoshard.runtime.profiling import SyntheticStep, profile
from benchmarks.document import caption, replace_table
from benchmarks.models import MODELS, Model, decoder_inputs, image_inputs, masked_inputs
from benchmarks.planning import code_digest

_DOCUMENT = Path(__file__).parent.parent / "docs" / "measured.md"
_STEPS, _WARM_UP = 10, 3
_BF16 = torch.bfloat16

CASES: Mapping[str, Model] = {
    "GPT-2, 8 x 1024 tokens": replace(MODELS["gpt2"], dtype=_BF16),
    "GPT-2 XL, 4 x 1024 tokens": replace(
        MODELS["gpt2-xl"], dtype=_BF16, inputs=decoder_inputs(4, 1024)
    ),
    "Llama 3.2 1B, 2 x 4096 tokens": Model(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        _BF16,
        decoder_inputs(2, 4096),
    ),
    "BERT large, 32 x 512 tokens": Model(
        "BertConfig",
        "BertForMaskedLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        _BF16,
        masked_inputs(32, 512),
    ),
    "T5 base, 16 x 512 and 128 tokens": replace(MODELS["t5-base"], dtype=_BF16),
    "Mixtral, 8 layers of 1024, 4 x 2048 tokens": Model(
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        _BF16,
        decoder_inputs(4, 2048),
    ),
    "ViT base, 64 images": replace(MODELS["vit-base"], dtype=_BF16),
    "ResNet-50, 128 images": replace(MODELS["resnet-50"], dtype=_BF16, inputs=image_inputs(128)),
}
"""Models by name; all fit a GPU of 80 GB."""

COMPILED = frozenset(list(CASES)[:3])
"""Those that are compiled too."""


Step = Callable[[], None]
"""Forward, backward and the optimizer."""


@dataclass(frozen=True)
class Measured:
    """A step on a GPU.

    Attributes:
        model: name of the model.
        kind: "as written", "compiled" or "planned"; or "planned" in part of the memory.
        predicted: seconds.
        seconds: measured.
        predicted_peak: bytes.
        peak: bytes that tensors had at the most.
        reserved: bytes that the allocator had from the GPU.
        rows: predicted and measured seconds by operator, of planned steps.
    """

    model: str
    kind: str
    predicted: float
    seconds: float
    predicted_peak: int
    peak: int
    reserved: int
    rows: tuple[tuple[str, float, float], ...] = ()


def plans_of(name: str, topology: str, folder: Path) -> dict[str, Plan]:
    """The plans for one device: of an eager step, of a compiled one, and in less memory.

    Those that this code has made before are taken from the folder.
    """
    file = folder / f"{topology} {name} {code_digest()}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = {kind: plan.to_json() for kind, plan in _made(name, topology)}
        file.write_text(json.dumps(made), encoding="utf-8")
    documents = json.loads(file.read_bytes())
    return {kind: Plan.from_json(text) for kind, text in documents.items()}


def _made(name: str, topology: str) -> Iterator[tuple[str, Plan]]:
    graph = load_graph(CASES[name].export())
    mesh = make_mesh((1,), axes=("one",), topology=topology)
    free = make_plan(graph, mesh)
    yield "planned", free
    if name in COMPILED:
        yield "compiled", make_plan(graph, mesh, PlanOptions(execution="compile"))
    assert free.memory is not None
    budget = int(0.7 * free.memory.peak)
    less = make_plan(graph, mesh, PlanOptions(memory_budget=budget, time_limit=20.0))
    if less.found:
        yield "planned, 70 % of the memory", less


def measured(
    launched: LaunchContext, names: Sequence[str], topology: str, folder: Path, file: Path
) -> None:
    """Write the steps of models as planned, as written, and compiled."""
    results = json.loads(file.read_bytes())
    for name in names:
        plans = plans_of(name, topology, folder)
        steps = list(_steps(launched, name, plans))
        print(table(steps), flush=True)
        results["steps"] += [asdict(one) for one in steps]
        file.write_text(json.dumps(results, indent=1), encoding="utf-8")


def _steps(launched: LaunchContext, name: str, plans: Mapping[str, Plan]) -> Iterator[Measured]:
    mesh, first = launched.device_mesh, plans["planned"]
    rows = profile(replace(launched, plan=first), num_steps=3).rows()
    yield replace(
        _measure(name, "planned", first, partial(SyntheticStep, first, mesh)),
        rows=tuple((row.name, row.predicted, row.measured) for row in rows),
    )
    less = "planned, 70 % of the memory"
    if less in plans:
        yield _measure(name, less, plans[less], partial(SyntheticStep, plans[less], mesh))
    yield _measure(name, "as written", first, partial(_written, name, compiles=False))
    if "compiled" in plans:
        yield _measure(name, "compiled", plans["compiled"], partial(_written, name, compiles=True))
        torch.compiler.reset()


def _written(name: str, *, compiles: bool) -> Step:
    """A step of the model as it is written."""
    model, inputs = CASES[name].build("cuda")
    if compiles:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _measure(name: str, kind: str, plan: Plan, make: Callable[[], Step]) -> Measured:
    """Median of several steps, and the most memory that one takes."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make()
    for _ in range(_WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(_STEPS):
        torch.cuda.synchronize()
        start = perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    assert plan.costs is not None
    assert plan.memory is not None
    return Measured(
        name,
        kind,
        plan.costs.total,
        median(seconds),
        plan.memory.peak,
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.max_memory_reserved(),
    )


def table(found: Sequence[Measured]) -> str:
    """A row for each step."""
    lines = [
        "| model | step | predicted | measured | ratio | predicted peak | measured | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.model} | {one.kind} | {1e3 * one.predicted:.1f} ms | {1e3 * one.seconds:.1f} ms "
        f"| {one.predicted / one.seconds:.2f} | {one.predicted_peak / 1e9:.2f} GB "
        f"| {one.peak / 1e9:.2f} GB | {one.predicted_peak / one.peak:.3f} |"
        for one in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="h100-sxm", help="a preset")
    parser.add_argument("--models", nargs="+", default=list(CASES), help="beginnings of names")
    parser.add_argument("--json", type=Path, help="file for the results; needs a GPU")
    parser.add_argument("--table", type=Path, help="results to write into the document")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--plans", type=Path, default=Path("build/one_gpu"), help="their folder")
    options = parser.parse_args()
    if options.table is None:
        _run(options)
        return
    results = json.loads(options.table.read_bytes())
    found = [Measured(**one) for one in results["steps"]]
    document = options.document.read_text(encoding="utf-8")
    text = f"{results['caption']}\n\n{table(found)}"
    options.document.write_text(replace_table(document, "one gpu", text), encoding="utf-8")


def _run(options: argparse.Namespace) -> None:
    """Plan and measure; results are written after each model."""
    names = [name for name in CASES if name.startswith(tuple(options.models))]
    plans = [plans_of(name, options.topology, options.plans) for name in names]
    if options.json is None:
        return
    head = caption(f"{options.topology}, medians of {_STEPS} steps")
    options.json.write_text(json.dumps({"caption": head, "steps": []}), encoding="utf-8")
    given = (names, options.topology, options.plans, options.json)
    launch(measured, plans[0]["planned"], given)


if __name__ == "__main__":
    main()
