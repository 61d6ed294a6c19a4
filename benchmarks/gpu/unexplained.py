"""The two rank cases that failed with NCCL and pass on CPUs, with all that may explain them.

Both run on the device and on the CPU of the same machine.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from runtime.cases import recomputation, timeline
from support.comparison import device_mesh
from support.devices import BACKEND, DEVICE, use_device
from support.live_memory import LiveMemory

from autoshard.graph import graph_from_json
from autoshard.lowering.timeline import timeline as memory_timeline
from autoshard.plan import Plan
from autoshard.runtime import parallelize, record_collectives, summarize
from benchmarks.gpu.child import Job
from benchmarks.gpu.ranks import Found, on_ranks

MEMORY = "timeline: mlp 2x2 free plain"
COLLECTIVES = "recomputation: llama 2x2 sequence one_of_each"

_REPEATS = 3
_VARIABLES = ("AUTOSHARD", "CUDA", "NCCL", "OMP", "PYTORCH", "TORCH")
"""Beginnings of environment variables that may matter."""


def run(job: Job) -> None:
    """Run the cases on the device of this process, which `AUTOSHARD_TEST_DEVICE` names."""
    if all(f"{name} on {DEVICE}" in job.done for name in (MEMORY, COLLECTIVES)):
        return
    plans = []
    for module, name in ((timeline, MEMORY), (recomputation, COLLECTIVES)):
        case = module.CASES[name.partition(": ")[2]]
        case.prepare()
        plans.append(case.plan.to_json())
    for name, result in on_ranks(traced, plans, 4, DEVICE):
        job.put(f"{name} on {DEVICE}", result)


def traced(memory: str, collectives: str) -> Iterator[Found]:
    """Both cases on this rank, with the results of all ranks."""
    torch.set_num_threads(1)
    use_device(int(os.environ["RANK"]))
    dist.init_process_group(BACKEND)
    variables = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    for name, trace, document in (
        (MEMORY, _memory, memory),
        (COLLECTIVES, _collectives, collectives),
    ):
        ranks: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(ranks, trace(Plan.from_json(document)))
        yield name, {"variables": variables, "ranks": ranks}


class _Traced(LiveMemory):
    """Writes down what each operator makes, and how much is alive after it."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, int, int]] = []
        self._makers: dict[int, str] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = dict(self._alive)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        after = dict(self._alive)  # threads of the backend change it
        new = {key: nbytes for key, nbytes in after.items() if before.get(key) != nbytes}
        self._makers |= dict.fromkeys(new, str(func))
        self.operators.append((str(func), sum(new.values()), self.nbytes))
        return result

    def alive(self) -> list[tuple[str, int]]:
        """Operator and bytes of each tensor that is alive."""
        return sorted((self._makers.get(key, "?"), n) for key, n in dict(self._alive).items())


def _memory(plan: Plan) -> dict[str, Any]:
    """Tensors that are alive between forward and backward, beside the bytes that were planned."""
    stage = plan.stages[0]
    planned = memory_timeline(stage, graph_from_json(stage.program), training=True)
    runs = []
    for _ in range(_REPEATS):
        torch.manual_seed(0)
        model, inputs = timeline.MODELS["mlp"]()
        running = parallelize(model, plan, device_mesh(plan), seed=7)
        gc.collect()
        with _Traced() as memory:
            outputs = running(**inputs)
            alive = memory.alive()
            outputs.backward(torch.ones_like(outputs))
        runs.append({"at_turn": alive, "peak": memory.peak, "operators": memory.operators})
    kinds = planned.nbytes.items()
    nbytes = {kind: {"at_turn": int(n[planned.turn]), "peak": int(n.max())} for kind, n in kinds}
    return {"planned": nbytes, "runs": runs}


def _collectives(plan: Plan) -> dict[str, Any]:
    """Collectives of a step in their order, beside those that are planned."""
    runs = []
    for _ in range(_REPEATS):
        torch.manual_seed(0)
        model, inputs = recomputation.MODELS["llama"]()
        mesh = device_mesh(plan)
        running = parallelize(model, plan, mesh, seed=7)
        with record_collectives(mesh) as recorder:
            running(**inputs)["loss"].backward()
        records = [(one.kind, one.axis, one.direction, one.nbytes) for one in recorder.records]
        as_planned = summarize(recorder.records) == plan.collectives
        runs.append({"as_planned": as_planned, "executed": records})
    return {"planned": [count.model_dump(mode="json") for count in plan.collectives], "runs": runs}
