"""Time that the host adds to the operators and parameters of a planned model, on one rank.

    python -m benchmarks.overhead

Writes tables into docs/performance.md. Tensors have 4 elements, so a step (forward and backward)
takes as long as the host needs to start its operators. The same module runs as written and as
planned for a mesh of one device, in turn in one process. Times are those of the processor, so that
other load of the machine counts little. The time per operator is the slope between chains of few
and of many operators; that per parameter is the slope between chains of products with few and with
many parameters, less that of the operators.

A second table has the time of the comparison of Python state before each call, for a model of 64
layers with 1,000 modules of which nothing has changed.
"""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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
from autoshard.runtime.python_state.state import PythonState
from benchmarks.document import DOCS, caption, write_table

_DOCUMENT = DOCS / "performance.md"
_FEW, _MANY = 64, 256
_STEPS = 7
_VOCABULARY, _TOKENS = 64, 8


class Operators(nn.Module):
    """A chain of operators, of which the first one has a parameter.

    Args:
        count: number of operators after the first one.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The operators, one after the other."""
        values = values * self.weight
        for _ in range(self.count):
            values = torch.tanh(values)
        return values.sum()


class Parameters(nn.Module):
    """A chain of operators with a parameter each.

    Args:
        count: number of parameters.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(4) for _ in range(count)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The products, one after the other."""
        for weight in self.weights:
            values = values * weight
        return values.sum()


class Layer(nn.Module):
    """A layer of a transformer, in which each part is a module.

    Args:
        size: number of features.
    """

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(2)])
        self.query, self.key, self.value, self.out, self.up, self.down = (
            nn.Linear(size, size) for _ in range(6)
        )
        self.drops = nn.ModuleList([nn.Dropout(0.1) for _ in range(3)])
        self.activation = nn.GELU()
        self.scale = 0.5

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """A gate in place of attention, then a network."""
        hidden = self.norms[0](values)
        gate = self.drops[0](torch.tanh(self.query(hidden) * self.key(hidden) * self.scale))
        values = values + self.drops[1](self.out(gate * self.value(hidden)))
        hidden = self.activation(self.up(self.norms[1](values)))
        return values + self.drops[2](self.down(hidden))


class Layers(nn.Module):
    """64 layers, 1,000 modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(64)])
        self.heads = nn.Sequential(*(nn.Identity() for _ in range(37)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The layers, one after the other."""
        for layer in self.layers:
            values = layer(values)
        return self.heads(values).sum()


def _gpt2() -> nn.Module:
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            n_layer=4,
            n_embd=8,
            n_head=2,
            n_positions=_TOKENS,
            vocab_size=_VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    return model


def _llama() -> nn.Module:
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=8,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=_VOCABULARY,
            max_position_embeddings=_TOKENS,
        )
    )
    return model


def _vector() -> dict[str, Any]:
    return {"values": torch.ones(4)}


def _tokens() -> dict[str, Any]:
    ids = torch.arange(_TOKENS).reshape(1, -1)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


class Case(NamedTuple):
    """A module and its arguments."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


CASES: Mapping[str, Case] = {
    f"{_FEW} operators": Case(lambda: Operators(_FEW), _vector),
    f"{_MANY} operators": Case(lambda: Operators(_MANY), _vector),
    f"{_FEW} products with a parameter": Case(lambda: Parameters(_FEW), _vector),
    f"{_MANY} products with a parameter": Case(lambda: Parameters(_MANY), _vector),
    "GPT-2, 4 layers of 8": Case(_gpt2, _tokens),
    "Llama, 4 layers of 8": Case(_llama, _tokens),
}
_SLOPES = list(CASES)[:4]

Step = Callable[[], None]
"""Forward and backward, after gradients were set to None."""


def plan_of(case: Case) -> Plan:
    """The plan for one device."""
    graph = load_graph(export_model(case.build(), (), case.inputs()))
    return make_plan(graph, make_mesh((1,), axes=("x",)))


def step_of(model: nn.Module, inputs: Mapping[str, Any]) -> Step:
    """A step of a model."""
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        result = model(**inputs)
        loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()  # type: ignore[no-untyped-call]  # torch

    return step


def measured(
    launched: LaunchContext, documents: Mapping[str, str], rounds: int
) -> list[list[float]]:
    """Seconds of a step in each round: of every case as written, and as planned."""
    torch.set_num_threads(1)
    steps = []
    for name, document in documents.items():
        case = CASES[name]
        planned = parallelize(case.build(), Plan.from_json(document), launched.device_mesh)
        steps += [step_of(case.build(), case.inputs()), step_of(planned, case.inputs())]
    found = []
    gc.disable()
    for _ in range(rounds + 3):
        gc.collect()
        found.append([_seconds(step) for step in steps])
    return found[3:]


def _seconds(step: Step) -> float:
    """Seconds of the fastest of several steps: other processes share caches with this one."""
    found = []
    for _ in range(_STEPS):
        start = thread_time()
        step()
        found.append(thread_time() - start)
    return min(found)


def table(rounds: Sequence[Sequence[float]], counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """A row for each case, and the slopes."""
    columns = [[1e6 * seconds for seconds in times] for times in zip(*rounds, strict=True)]
    pairs = dict(zip(counts, zip(columns[::2], columns[1::2], strict=True), strict=True))
    lines = [
        "| model | operators | parameters | as written | planned | added by the plan | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (written, planned) in pairs.items():
        added = _median_of(planned, written, lambda one, other: one - other)
        ratio = _median_of(planned, written, lambda one, other: one / other)
        operators, parameters = counts[name]
        lines.append(
            f"| {name} | {operators} | {parameters} | {median(written):.0f} us "
            f"| {median(planned):.0f} us | {added:.0f} us | {ratio:.2f} |"
        )
    few, many, few_weights, many_weights = (pairs[name] for name in _SLOPES)
    written, planned = _slope(few[0], many[0]), _slope(few[1], many[1])
    with_weight = [_slope(few_weights[side], many_weights[side]) for side in range(2)]
    lines.append(_slope_row("one operator", "1 | 0", written, planned))
    lines.append(_slope_row("one product with a parameter", "1 | 1", *with_weight))
    return lines


def _median_of(
    planned: Sequence[float], written: Sequence[float], compare: Callable[[float, float], float]
) -> float:
    """Median over the rounds of what compares the two."""
    return median(compare(one, other) for one, other in zip(planned, written, strict=True))


def _slope_row(name: str, counts: str, written: float, planned: float) -> str:
    return (
        f"| {name} | {counts} | {written:.1f} us | {planned:.1f} us | {planned - written:.1f} us "
        f"| {planned / written:.2f} |"
    )


def _slope(few: Sequence[float], many: Sequence[float]) -> float:
    """Median of the microseconds per unit between the two counts."""
    slopes = (more - less for less, more in zip(few, many, strict=True))
    return median(slopes) / (_MANY - _FEW)


def state_table(rounds: int) -> list[str]:
    """A row with the time in which a model and its record are compared."""
    model = Layers()
    graph = load_graph(export_model(model, (torch.ones(2, 4),)))
    stored = [name for name, _ in model.named_parameters()]
    state = PythonState(model, {"": graph}, stored, ())
    state.check_applies()
    found = []
    gc.disable()
    for _ in range(rounds + 3):
        gc.collect()
        found.append(1e6 * _seconds(lambda: state.check(model, "")))
    return [
        "| model | modules | comparison before a call |",
        "|---|---:|---:|",
        f"| 64 layers | {len(list(model.modules()))} | {median(found[3:]):.0f} us |",
    ]


def main() -> None:
    """Plan, run, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--only-state", action="store_true", help="Write the second table alone.")
    options = parser.parse_args()
    if not options.only_state:
        _write_steps(options)
    head = caption(f"median of {options.rounds} rounds, the fastest of {_STEPS} calls in each")
    _write(options, "state", [head, "", *state_table(options.rounds)])


def _write_steps(options: argparse.Namespace) -> None:
    plans = {name: plan_of(case) for name, case in CASES.items()}
    head = caption(f"medians of {options.rounds} rounds, the fastest of {_STEPS} steps in each")
    documents = {name: plan.to_json() for name, plan in plans.items()}
    rounds = launch(measured, next(iter(plans.values())), (documents, options.rounds))[0]
    counts = {
        name: (len(plan.stages[0].nodes), len(list(plan.stages[0].parameters)))
        for name, plan in plans.items()
    }
    _write(options, "overhead", [head, "", *table(rounds, counts)])


def _write(options: argparse.Namespace, name: str, lines: Sequence[str]) -> None:
    text = "\n".join(lines)
    print(text, flush=True)
    write_table(options.document, name, text)


if __name__ == "__main__":
    main()
