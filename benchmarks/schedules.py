"""Predicted and measured step times of torch's schedules, on gloo ranks whose stages sleep.

    python -m benchmarks.schedules

Writes all cases into benchmarks/results, and a summary into docs/internals/schedules.md. A sleeping
stage needs no core, so ranks do not disturb each other: what is compared is when actions run.
Backward of weights is apart, as in torch's `PipelineStage`.
"""

import argparse
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.stats import spearmanr
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from autoshard.plan import StageTimes
from autoshard.schedules import Schedule, simulate_schedule
from autoshard.schedules.schedule import SCHEDULE_NAMES
from benchmarks.document import RESULTS, caption, replace_table

_DOCUMENT = Path(__file__).parent.parent / "docs" / "internals" / "schedules.md"
_RANKS, _MICRO_BATCHES, _STEPS = 4, 8, 4
_SECONDS = 0.04
"""Mean of forward, backward of inputs and backward of weights of all stages of a rank."""

Case = tuple[str, Schedule, list[StageTimes]]


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float, back: float) -> torch.Tensor:
        ctx.seconds = back
        time.sleep(seconds)
        return tensor * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class _Stage(nn.Module):
    """A stage that takes given times.

    Args:
        times: of a micro-batch.
    """

    def __init__(self, times: StageTimes) -> None:
        super().__init__()
        self._times = times
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sleep, and multiply by a weight whose gradient takes its time as well."""
        times = self._times
        hidden = _Sleep.apply(inputs, times.forward, times.backward_input)  # type: ignore[no-untyped-call]  # torch
        weight = _Sleep.apply(self.weight, 0.0, times.backward_weight)  # type: ignore[no-untyped-call]  # torch
        product: torch.Tensor = hidden * weight
        return product


def cases() -> Iterator[Case]:
    """Every schedule with equal and with unequal stages."""
    generator = random.Random(0)
    for name in SCHEDULE_NAMES:
        per_rank = 1 if name in {"GPipe", "1F1B"} else 2
        schedule = Schedule(name, _RANKS, per_rank, _MICRO_BATCHES)
        for kind, spread in (("equal", 0.0), ("unequal", 0.5)):
            times = [
                StageTimes(
                    forward=generator.uniform(1 - spread, 1 + spread) * _SECONDS / per_rank,
                    # The inputs of the first stage have no gradients.
                    backward_input=generator.uniform(1 - spread, 1 + spread)
                    * (_SECONDS / per_rank if stage else 0.0),
                    backward_weight=generator.uniform(1 - spread, 1 + spread) * _SECONDS / per_rank,
                    end=0.0,
                )
                for stage in range(schedule.num_stages)
            ]
            yield kind, schedule, times


def measure(rank: int, port: int, path: str) -> None:
    """Least seconds of a step of each case, which the first rank saves."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=_RANKS)
    seconds = [_step_seconds(rank, schedule, times) for _, schedule, times in cases()]
    if rank == 0:
        torch.save(torch.tensor(seconds, dtype=torch.float64), path)
    dist.destroy_process_group()


def _step_seconds(rank: int, schedule: Schedule, times: Sequence[StageTimes]) -> float:
    held = schedule.stages_of_rank(rank)
    stages = [
        PipelineStage(_Stage(times[s]), s, schedule.num_stages, torch.device("cpu")) for s in held
    ]
    make: Any = get_schedule_class(schedule.name)
    one = stages[0] if schedule.name in {"GPipe", "1F1B"} else stages
    runs = make(one, schedule.micro_batches, loss_fn=lambda output, _: output.sum())
    batch = torch.ones(schedule.micro_batches, 8)
    inputs = (batch,) if 0 in held else ()
    target = {"target": batch} if schedule.num_stages - 1 in held else {}
    found = []
    for _ in range(_STEPS):
        dist.barrier()
        began = time.perf_counter()
        runs.step(*inputs, **target)
        dist.barrier()
        found.append(time.perf_counter() - began)
    return min(found)


def table(seconds: Sequence[float]) -> str:
    """Table of all cases."""
    lines = ["| schedule | stages | predicted | measured | times as long |"]
    lines.append("|---|---|---:|---:|---:|")
    for (kind, schedule, times), measured in zip(cases(), seconds, strict=True):
        predicted = simulate_schedule(schedule, times).seconds
        lines.append(
            f"| {schedule.name} | {schedule.num_stages}, {kind} | {1e3 * predicted:.0f} ms | "
            f"{1e3 * measured:.0f} ms | {measured / predicted:.2f} |"
        )
    return "\n".join(lines)


def summary(seconds: Sequence[float]) -> str:
    """Range of the errors of all cases, and the rank correlation."""
    predicted = [simulate_schedule(schedule, times).seconds for _, schedule, times in cases()]
    ratios = [measured / one for measured, one in zip(seconds, predicted, strict=True)]
    correlation = spearmanr(predicted, seconds).statistic
    return (
        f"{len(ratios)} cases took {min(ratios):.2f} to {max(ratios):.2f} times as long as "
        f"predicted. Spearman's rank correlation: **{correlation:.3f}**"
    )


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--details", type=Path, default=RESULTS / "schedules.md")
    options = parser.parse_args()
    text = caption(f"least of {_STEPS} steps")
    path = options.document.with_suffix(".seconds.pt")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(measure, (port, str(path)), _RANKS)
    seconds = torch.load(path).tolist()
    path.unlink()
    options.details.write_text(f"{text}\n\n{table(seconds)}\n", encoding="utf-8")
    found = f"{text}\n\n{summary(seconds)}"
    print(table(seconds), found, sep="\n\n", flush=True)
    document = options.document.read_text(encoding="utf-8")
    options.document.write_text(replace_table(document, "schedules", found), encoding="utf-8")


if __name__ == "__main__":
    main()
