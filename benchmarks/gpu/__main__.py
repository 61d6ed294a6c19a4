"""All that one GPU can say in eight minutes: steps, memory, collectives, rank cases, prices.

    make gpu                  # on the machine with the GPU
    make gpu DEVICE=cpu       # all of it in small

Parts run in the order of their value, with a share of the time each, and each has a file of
results. Started again, it goes on where it was interrupted; what is there of other code, another
card or another torch is measured anew. The tables of docs/measured.md are made of the files.
"""

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import NoReturn

from benchmarks.gpu.header import Unusable, check_torch, header_of
from benchmarks.gpu.packages import install_wheels
from benchmarks.gpu.parts import MODELS, Part, parts_of
from benchmarks.gpu.records import Record
from benchmarks.gpu.runner import run_part
from benchmarks.gpu.sharing import Sharing, sharing_of
from benchmarks.gpu.tables import page, summary

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "measured.md"
_SECONDS = 480.0
_LEAST = 10.0
"""Seconds below which a part is not started."""


def main() -> int:
    """Measure, write the page, and print the goals."""
    options = _options()
    if not options.tables:
        for number in (signal.SIGTERM, signal.SIGINT):  # ignored where a shell runs it with `&`
            signal.signal(number, _terminated)
        try:
            _measure(options, deadline=monotonic() + options.seconds)
        except Unusable as error:
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted: the same command goes on from here", file=sys.stderr)
            return 130
    records = [
        record
        for part in parts_of(options.device, options.models)
        if (record := Record.read(options.results / f"{part.name}.json")) is not None
    ]
    # What was measured on a CPU is not for readers: it shows that the page can be written.
    target = _PAGE if options.device == "cuda" else options.results / _PAGE.name
    target.write_text(page(_PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    print("\n".join(summary(records)))
    return 0 if records and all(record.complete for record in records) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, help="folder of the results")
    parser.add_argument("--wheels", type=Path, default=_ROOT / "build" / "gpu-wheels")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="of all parts together")
    parser.add_argument("--commit", default="", help="of the code, where there is no git")
    parser.add_argument("--allow-old-torch", action="store_true")
    parser.add_argument("--tables", action="store_true", help="only write the page")
    options = parser.parse_args()
    options.models = tuple(options.models)
    if options.results is None:
        is_cpu = options.device == "cpu"
        options.results = _ROOT / ("build/gpu" if is_cpu else "benchmarks/results/gpu")
    return options


def _terminated(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _measure(options: argparse.Namespace, deadline: float) -> None:
    """Run the parts that are not complete."""
    check_torch(allow_old=options.allow_old_torch)
    packages = install_wheels(options.wheels)
    folders = (_ROOT, _ROOT / "server", _ROOT / "solver_cache", _ROOT / "tests", packages)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    os.environ["AUTOSHARD_TEST_TIMEOUT"] = "60"
    if options.allow_old_torch:
        os.environ["AUTOSHARD_ANY_TORCH"] = "1"
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    options.results.mkdir(parents=True, exist_ok=True)
    header = header_of(options.device, options.models, options.commit)
    parts = parts_of(options.device, options.models)
    records = {part.name: Record.resumed(options.results, part.name, header) for part in parts}
    missing = [part for part in parts if not records[part.name].complete]
    with ExitStack() as stack:
        sharing: Sharing | None = None
        for part in missing:
            if part.shares_gpu and sharing is None:
                sharing = stack.enter_context(sharing_of(header))
            later = sum(other.seconds for other in missing[missing.index(part) + 1 :])
            _run(part, records[part.name], sharing, options, deadline - monotonic() - later)


def _run(
    part: Part,
    record: Record,
    sharing: Sharing | None,
    options: argparse.Namespace,
    seconds: float,
) -> None:
    """Run a part if there is time for it and ranks can share the device, if they have to."""
    print(f"{part.name}, {max(seconds, 0):.0f} s", flush=True)
    if seconds < _LEAST:
        record.add(part.name, None, "the time was over before it began")
        return
    variables = {}
    if part.shares_gpu:
        assert sharing is not None
        if not sharing.name:
            record.add(part.name, None, "ranks cannot share this GPU")
            return
        record.header = {**record.header, "sharing": sharing.name}
        variables = dict(sharing.variables)
    run_part(
        {name: _command(part, name, options, seconds) for name in part.processes},
        record,
        seconds,
        variables,
    )


def _command(part: Part, process: str, options: argparse.Namespace, seconds: float) -> list[str]:
    device = process if process in {"cpu", "cuda"} else options.device
    return [
        *(sys.executable, "-m", "benchmarks.gpu.child", part.name, process),
        *("--device", device, "--folder", str(options.results)),
        *("--seconds", str(seconds - 3), "--models", *options.models),
    ]


if __name__ == "__main__":
    sys.exit(main())
