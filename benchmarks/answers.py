"""From a config and a number of GPUs to an answer: `autoshard plan CONFIG --gpus N`, timed.

Each case is a fresh process of the command, without a cache of solved blocks. Its plan is read
back: the table has the verdict, and says when a usual layout was faster than the plan.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from types import MappingProxyType
from typing import Any, NamedTuple

from autoshard.plan import Plan
from autoshard.report import answer_of

CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    json.loads(Path(__file__).with_name("configs.json").read_text(encoding="utf-8"))
)
"""Published sizes of models; what a config leaves out has the default of transformers."""

NUM_GPUS = (8, 64, 1024)
_SAMPLES = 4
"""Samples of a step for each GPU, of as many tokens as the model has, 4,096 at most."""
_MOST_SECONDS = 400.0
"""Seconds after which an answer is given up."""
_FIRST = re.compile(r"best \d|comparing|micro-batches: ")
HEADER = ("model", "GPUs", "first answer, s", "answer, s", "of the processor, s", "verdict")


class Timed(NamedTuple):
    """Output of a command, and its seconds: until a plan is known, in all, of the processor."""

    first: float | None
    whole: float
    processor: float
    output: str


def measure_answers(names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The row of each model and number of GPUs; of all models if none is named."""
    with TemporaryDirectory() as folder:
        for name in names or CONFIGS:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps({"dtype": "bfloat16", **CONFIGS[name]}), encoding="utf-8")
            for gpus in NUM_GPUS:
                path = Path(folder) / "plan.json"
                path.unlink(missing_ok=True)
                timed = _run(config, gpus, path)
                first = "-" if timed.first is None else f"{timed.first:.1f}"
                times = (first, f"{timed.whole:.1f}", f"{timed.processor:.1f}")
                yield name, str(gpus), *times, _verdict(path, timed.output)


def _run(config: Path, gpus: int, path: Path) -> Timed:
    command = [
        *(sys.executable, "-m", "autoshard.cli", "plan", str(config), "--gpus", str(gpus)),
        *("--topology", "h100-sxm", "--global-batch", str(_SAMPLES * gpus), "-o", str(path)),
    ]
    environment = {**os.environ, "AUTOSHARD_CACHE": str(path.with_name(f"{gpus}-{config.name}"))}
    start, before = time.perf_counter(), os.times()
    lines, first = [], None
    with subprocess.Popen(  # noqa: S603  our own command
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        latest = Timer(_MOST_SECONDS, process.kill)
        latest.start()
        for line in process.stdout:
            lines.append(line)
            if first is None and _FIRST.search(line):
                first = time.perf_counter() - start
        latest.cancel()
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return Timed(first, time.perf_counter() - start, used, "".join(lines))


def _verdict(path: Path, output: str) -> str:
    if not path.exists():
        return (output.strip().splitlines() or ["no output"])[-1].replace("|", "/")
    return answer_of(Plan.load(path)).verdict
