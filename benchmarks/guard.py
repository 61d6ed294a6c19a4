"""Thirteen plans that a change of the code alone must leave as they are.

`python -m benchmarks.guard` makes them and compares step time, bound, memory, layouts and
collectives with benchmarks/results/guard.json; the exit status is 1 if one differs. `--write`
records them, after a change that is meant to give other plans.
"""

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from autoshard.exports import read_like
from autoshard.graph import Graph, load_graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from benchmarks.models import MODELS

RESULT = Path(__file__).parent / "results" / "guard.json"


@dataclass(frozen=True)
class Case:
    """A request for a plan.

    Attributes:
        model: name of the model.
        mesh: sizes of the axes, as `make_plan` takes them.
        options: of planning.
        like: a layout of another framework, in a few words; its axes take the place of the mesh.
    """

    model: str
    mesh: str
    options: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""

    def plan(self) -> Plan:
        """The plan."""
        options, mesh = PlanOptions(**self.options), self.mesh
        if self.like:
            found = read_like(self.like, num_ranks=int(self.mesh))
            mesh = ",".join(f"{name}={size}" for name, size in found.axes)
            options = found.options.with_values(**dict(self.options))
        return make_plan(_graph(self.model), mesh, options)


CASES: Mapping[str, Case] = {
    "training": Case("gpt2", "2x4"),
    "inference": Case("gpt2", "2x4", {"mode": "inference"}),
    "one axis": Case("bert-base", "8"),
    "three axes": Case("gpt2", "2x2x2"),
    "a large model": Case("llama3-8b-8-layers", "8x8"),
    "an encoder and a decoder": Case("t5-base", "2x4"),
    "a budget": Case("gpt2", "2x4", {"memory_budget": "1.5GB"}),
    "a budget of micro-batches": Case(
        "llama3-8b-8-layers",
        "4x4",
        {"memory_budget": "24GB", "micro_batches": 4, "relative_gap": 0.05},
    ),
    "pins": Case("gpt2", "dp=2,tp=4", {"pins": {"outputs": {"1": "S(0),I"}}}),
    "no all-to-all": Case("gpt2", "2x4", {"forbid": [{"kind": "all_to_all"}], "optimizer": "sgd"}),
    "overlap": Case("gpt2", "2x4", {"overlap": True, "execution": "compile"}),
    "megatron": Case("llama3-8b-8-layers", "16", like="megatron tp=8 sp zero1"),
    "a pipeline": Case("gpt2", "pp=4,dp=2", {"stages": 4, "micro_batches": 8}),
}


@cache
def _graph(model: str) -> Graph:
    return load_graph(MODELS[model].export())


def _record(plan: Plan) -> dict[str, Any]:
    """The figures and layouts of a plan that must not change, in any version of the document."""
    assert plan.costs is not None
    assert plan.memory is not None
    assert plan.certificate.bound is not None
    layouts = sorted(
        (number, node.name, node.inputs, node.outputs)
        for number, stage in enumerate(plan.stages)
        for node in stage.nodes
    )
    return {
        "status": plan.certificate.status.value,
        "seconds": float(f"{plan.costs.total:.9g}"),
        "bound": float(f"{plan.certificate.bound:.9g}"),
        "peak": plan.memory.peak,
        "layouts": hashlib.sha256(json.dumps(layouts).encode()).hexdigest()[:16],
        "collectives": {
            f"{one.kind} {one.axis} {one.direction}": [one.count, one.nbytes]
            for one in plan.collectives
        },
    }


def main() -> int:
    """Make the plans, and compare or record them."""
    parser = argparse.ArgumentParser(description="Compare thirteen plans with recorded ones.")
    parser.add_argument("--write", action="store_true", help="record the plans")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = {}
    for name, case in CASES.items():
        found[name] = _record(case.plan())
        print(f"{name}: {found[name]['status']}, {found[name]['seconds']} s a step", flush=True)
    if options.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    recorded = json.loads(RESULT.read_text(encoding="utf-8"))
    different = [name for name in CASES if found[name] != recorded.get(name)]
    for name in different:
        print(f"{name}: {found[name]}\n  recorded: {recorded.get(name)}")
    print(f"{len(CASES)} plans, {len(different)} differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
