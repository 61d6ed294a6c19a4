"""Runs combinations of models and loops on four ranks, of which each is a fork of one process."""

import faulthandler
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.runtime import parallelize
from benchmarks.habits.loops import Loop, Run, parts_of
from benchmarks.habits.models import MESHES, Planned
from benchmarks.habits.outcomes import (
    ON_ONE_DEVICE,
    WRONG,
    Expected,
    Outcome,
    agreed,
    compare,
    expected,
)

NUM_RANKS = 4
LOOPS_PER_MODEL = 40
TIMEOUT = timedelta(seconds=60)
"""After which a rank that waits for others ends."""
_PATIENCE = 100.0
"""Seconds without any outcome after which ranks are killed."""
_TICK, _COLLECTED = 0.02, 50


@dataclass(frozen=True)
class Combination:
    """A model and a loop, determined by a seed.

    Attributes:
        seed: of both; `LOOPS_PER_MODEL` seeds in a row have one model.
        one: the model.
        two: another model in the loop.
        loop: what is done with them.
        expected: what it prints on one device.
    """

    seed: int
    one: Planned
    two: Planned
    loop: Loop
    expected: Expected = field(repr=False)

    def on_this_rank(self) -> Outcome:
        """Run the loop with planned models."""

        def planned(model: nn.Module, of: Planned) -> nn.Module:
            return parallelize(model, of.plans, _mesh(of.drawn.mesh))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                parts = parts_of(self.one, self.two, planned)
            except Exception as error:  # noqa: BLE001  a plan that does not apply is an outcome
                return Outcome(WRONG, 0, f"parallelize: {type(error).__name__}: {error}")
            return compare(Run(self.loop, self.one.drawn, parts), self.expected)

    def __str__(self) -> str:
        plans = [
            {
                "inputs": [(p.name, p.layout) for p in plan.stages[0].inputs],
                "outputs": [(p.name, p.layout) for p in plan.stages[0].outputs],
                "parameters": [(p.name, p.layout) for p in plan.stages[0].parameters],
            }
            for plan in (*self.one.plans.values(), *self.two.plans.values())
        ]
        return f"{self.one.drawn}\n{self.two.drawn}\n{plans}\n{self.loop}"


@dataclass(frozen=True)
class Result:
    """A combination that has ended.

    Attributes:
        seed: of the combination.
        outcome: of all ranks.
        habits: what the loop does.
        blocks: of the model.
        text: the combination in words, if asked for.
    """

    seed: int
    outcome: Outcome
    habits: tuple[str, ...]
    blocks: tuple[str, ...]
    text: str = ""


@cache
def _mesh(name: str) -> DeviceMesh:
    axes = MESHES[name]
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@cache
def _models(seed: int) -> tuple[Planned, Planned]:
    """Two models of a seed."""
    draw = random.Random(f"models/{seed}")
    one = Planned.of(draw)
    return one, Planned.of(draw, like=one.drawn)


def combinations(seeds: Sequence[int]) -> Iterator[Combination]:
    """Make models, plans and loops; run the loops on one device."""
    _models.cache_clear()
    for seed in seeds:
        one, two = _models(seed // LOOPS_PER_MODEL)
        loop = Loop.of(f"loop/{seed}", one.drawn)
        yield Combination(seed, one, two, loop, expected(loop, one, two))


def run_launch(seeds: Sequence[int], *, is_shown: bool = False) -> Iterator[Result]:
    """Run combinations on ranks, and those that were wrong once more, alone."""
    remaining = []
    for combination in combinations(seeds):
        if combination.expected.error:
            yield _result(
                combination,
                Outcome(ON_ONE_DEVICE, 0, combination.expected.error),
                is_shown=is_shown,
            )
        else:
            remaining.append(combination)
    wrong: list[tuple[Combination, Outcome]] = []
    while remaining:
        outcomes = _run_forks(remaining)
        for combination, outcome in zip(remaining, outcomes, strict=False):
            if outcome.kind == WRONG:
                wrong.append((combination, outcome))
            else:
                yield _result(combination, outcome, is_shown=is_shown)
        remaining = remaining[len(outcomes) :]
    for combination, outcome in wrong:
        (alone,) = _run_forks([combination])
        if alone.kind != WRONG:
            text = f"after others of its launch, not alone: {outcome.text}"
            alone = replace(outcome, text=text)
        yield _result(combination, alone, is_shown=is_shown)


def _result(combination: Combination, outcome: Outcome, *, is_shown: bool) -> Result:
    loop, blocks = combination.loop, combination.one.drawn.blocks
    text = str(combination) if is_shown else ""
    return Result(combination.seed, outcome, tuple(map(str, loop.habits)), blocks, text)


def _run_forks(given: Sequence[Combination]) -> list[Outcome]:
    """Run combinations on new ranks, up to the first that ranks end differently."""
    context = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()
    with TemporaryDirectory(prefix="habits-") as name:
        folder = Path(name)
        ranks = [context.Process(target=_rank, args=(r, given, folder)) for r in range(NUM_RANKS)]
        for rank in ranks:
            rank.start()
        begun, before = time.monotonic(), 0
        while any(rank.is_alive() for rank in ranks):
            time.sleep(_TICK)
            done = sum(map(len, _outcomes(folder))) if time.monotonic() - begun > _PATIENCE else 0
            if done > before:
                begun, before = time.monotonic(), done
            elif time.monotonic() - begun > _PATIENCE:
                break
        stacks = _stopped(ranks, folder)
        found = [agreed(ranks) for ranks in zip(*_outcomes(folder), strict=False)]
    if len(found) < len(given) and not (found and found[-1].kind == WRONG):
        found.append(Outcome(WRONG, 0, "ranks do not end, or one died", stacks))
    return found


def _stopped(ranks: Sequence[BaseProcess], folder: Path) -> str:
    """Kill ranks that still run; where they were."""
    running = [rank for rank in ranks if rank.is_alive() and rank.pid is not None]
    for rank in running:
        os.kill(rank.pid or 0, signal.SIGUSR1)
    if running:
        time.sleep(1.0)
    for rank in ranks:
        rank.kill()
        rank.join()
    return "\n".join(file.read_text() for file in sorted(folder.glob("*.stack")))


def _outcomes(folder: Path) -> list[list[Outcome]]:
    """The outcomes of each rank."""
    found = []
    for rank in range(NUM_RANKS):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found.append([Outcome(**json.loads(line)) for line in lines])
    return found


def _rank(rank: int, given: Sequence[Combination], folder: Path) -> None:
    """One rank's life; it ends with the first combination after which ranks may not be in step."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "rendezvous"), NUM_RANKS)
    store.set_timeout(TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    with (folder / f"{rank}.jsonl").open("w") as file:
        for number, combination in enumerate(given):
            outcome = combination.on_this_rank()
            file.write(json.dumps(outcome.as_json()) + "\n")
            file.flush()
            store.set(f"{number}/{rank}", json.dumps([outcome.kind, outcome.step]))
            states = [store.get(f"{number}/{other}") for other in range(NUM_RANKS)]
            # Ranks that have failed alike have run the same collectives.
            if any(state != states[0] for state in states):
                break
            if number % _COLLECTED == 0:
                gc.collect()
    sys.stdout.flush()
    os._exit(0)  # other ranks may still be within a collective


def prepare() -> None:
    """Make forks possible: nothing may have started threads."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.ones(1, requires_grad=True).sum().backward()
