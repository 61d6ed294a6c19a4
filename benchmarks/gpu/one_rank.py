"""Planned models on one rank beside the same as written and under FSDP2: time, memory, kernels.

Each model has a process. Processes compile side by side, and measure one at a time.
"""

import fcntl
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from autoshard import PlanOptions, export_model, load_graph, make_mesh, make_plan, parallelize
from benchmarks.gpu.child import Job
from benchmarks.gpu.devices import DEVICES, Device, Step
from benchmarks.gpu.models import CASES
from benchmarks.gpu.ranks import join_as_one_rank
from benchmarks.gpu.traces import summary, traced
from benchmarks.plain_models import PlainModel

_WARM_UP, _STEPS = 5, 20
_NOT_COMPILED: Mapping[str, Any] = {"graphs": 0, "graph_breaks": 0}

_COMPILING = 0.55
"""Share of the time after which models that are still compiled are given up."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a model.

    Attributes:
        kind: "planned", "as written" or "FSDP2".
        compiled: True under `torch.compile`.
    """

    kind: str
    compiled: bool = False


VARIANTS: Mapping[str, Variant] = {
    "planned, compiled": Variant("planned", compiled=True),
    "as written, compiled": Variant("as written", compiled=True),
    "planned": Variant("planned"),
    "as written": Variant("as written"),
    "FSDP2": Variant("FSDP2"),
}
"""In the order in which they are measured."""


@dataclass
class Built:
    """A model that is ready to be measured.

    Attributes:
        model: called with the batch.
        own: bytes of its parameters.
        facts: seconds of compilation, number of graphs and of graph breaks.
    """

    model: nn.Module
    own: int
    facts: Mapping[str, Any]


def run(job: Job) -> None:
    """Measure the missing variants of the model that the process is named after."""
    with _locked(job.folder, fcntl.LOCK_SH):
        benchmark = _Benchmark(job)
        benchmark.compile()
    with _locked(job.folder, fcntl.LOCK_EX):
        benchmark.measure()
        benchmark.context.close()


@contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """A context in which nobody measures (shared), or nobody else does anything (exclusive)."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, kind)
        yield
    finally:
        os.close(lock)


class _Benchmark:
    """The variants of one model."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._device = DEVICES[job.device]()
        self._model = CASES[job.process].on(job.device)
        names = {name: f"{job.process}: {name}" for name in VARIANTS}
        self._missing = {n: full for n, full in names.items() if full not in job.done}
        graph = load_graph(export_model(*self._model.export_arguments()))
        mesh = make_mesh((1,), axes=("one",), topology=job.topology)
        self._plans = {
            False: make_plan(graph, mesh),
            True: make_plan(graph, mesh, PlanOptions(execution="compile")),
        }
        self._compiled: dict[str, Built] = {}
        self.context = join_as_one_rank(self._plans[False])

    def compile(self) -> None:
        """Compile what is to be compiled, while other models are compiled beside it."""
        begin = monotonic()
        seconds = _COMPILING * (self._job.deadline - begin)
        for name, full in list(self._missing.items()):
            if VARIANTS[name].compiled:
                with self._job.failures_of(full), _at_most(begin + seconds - monotonic()):
                    self._compiled[name] = self._built(VARIANTS[name])
        self._device.release()

    def measure(self) -> None:
        """Measure all variants, while nobody else uses the device."""
        for name, full in self._missing.items():
            if VARIANTS[name].compiled and name not in self._compiled:
                continue
            with self._job.failures_of(full):
                built = self._compiled.pop(name, None) or self._built(VARIANTS[name])
                self._measure(full, VARIANTS[name], built)
            built = None
            self._device.release()

    def _built(self, variant: Variant) -> Built:
        before = self._device.allocated()
        model = self._model.build(self._device.device)
        mesh = self.context.device_mesh
        if variant.kind == "planned":
            model = parallelize(model, self._plans[variant.compiled], mesh)
        elif variant.kind == "FSDP2":
            for block in model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        facts = self._compile(model) if variant.compiled else _NOT_COMPILED
        model.zero_grad()
        self._device.release()
        return Built(model, self._device.allocated() - before, facts)

    def _compile(self, model: nn.Module) -> dict[str, Any]:
        """Compile a model by running forward and backward once."""
        counters.clear()
        start = perf_counter()
        model.compile(backend=self._device.compiler)
        model(**self._model.inputs(self._device.device)).backward()
        return {
            "compile_seconds": perf_counter() - start,
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
        }

    def _measure(self, full: str, variant: Variant, built: Built) -> None:
        """Put the time and memory of steps, then the same with a trace of one."""
        device, plan = self._device, self._plans[variant.compiled]
        others = device.allocated() - built.own
        step = _step(built.model, self._model, device)
        device.seconds(step, _WARM_UP)
        device.reset_peak()
        seconds = device.seconds(step, _STEPS)
        peak = max(device.peak() - others, 1)  # on a CPU, memory may have been there before
        assert plan.costs is not None
        assert plan.memory is not None
        is_predicted = variant.kind != "FSDP2"
        result = {
            "seconds": median(seconds),
            "predicted_seconds": plan.costs.total if is_predicted else None,
            "peak": peak,
            "predicted_peak": plan.memory.peak if is_predicted else None,
            "all_seconds": seconds,
            **built.facts,
        }
        self._job.put(full, result | summary((), device.kernels))
        with self._job.failures_of(f"{full}, trace"):
            self._job.put(full, result | traced(step, device))


def _step(model: nn.Module, described: PlainModel, device: Device) -> Step:
    """Forward, backward, and AdamW in one kernel."""
    inputs = described.inputs(device.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        model(**inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """A context that is left with a `TimeoutError` after a time."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not compiled in the {seconds:.0f} s that were left")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
