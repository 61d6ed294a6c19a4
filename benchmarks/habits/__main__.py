"""Random training loops with random planned models, compared with one device in float64.

`python -m benchmarks.habits` runs 10,000 combinations, each on four ranks, and writes the result
into docs/training.md and benchmarks/results/habits.json. Launches that ended before it was stopped
are kept in the folder. `--seed S` runs one combination again, and shows it.
"""

import argparse
import json
import multiprocessing
import platform
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.document import caption, commit, write_table
from benchmarks.habits.launches import LOOPS_PER_MODEL, Result, prepare, run_launch
from benchmarks.habits.outcomes import (
    BY_TORCH,
    ON_ONE_DEVICE,
    OUTCOMES,
    REFUSED,
    RIGHT,
    WRONG,
    Outcome,
)

_ROOT = Path(__file__).parents[2]
_DOCUMENT = _ROOT / "docs" / "training.md"
_RESULT = Path(__file__).parents[1] / "results" / "habits.json"
_PER_LAUNCH = 5 * LOOPS_PER_MODEL
_MEANINGS = {
    RIGHT: "all numbers are those of one device, on every rank",
    REFUSED: "an error of autoshard, on all ranks at one place; all numbers before are right",
    BY_TORCH: "an error of PyTorch, likewise",
    ON_ONE_DEVICE: "not compared",
    WRONG: "another number, or ranks end differently or not at all",
}


def main() -> int:
    """Run combinations and write the result; 1 if one was wrong."""
    options = _parser().parse_args()
    if options.seed is not None:
        return _again(options.seed)
    if options.again:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    head = caption("seeds and commits are in habits.json")
    _run(options)
    record = _record(options)
    table = _table(record)
    print(table)
    if options.write:
        _RESULT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        write_table(options.document, "random habits", f"{head}\n\n{table}")
    return int(bool(record["outcomes"].get(WRONG)))


def _run(options: argparse.Namespace) -> None:
    """Run the launches whose results are not in the folder yet."""
    end = options.first + options.count
    starts = range(options.first, end, _PER_LAUNCH)
    every = [range(first, min(first + _PER_LAUNCH, end)) for first in starts]
    launches = [seeds for seeds in every if not _file(options.folder, seeds).exists()]
    prepare()
    # Workers start ranks, which daemons, as those of a pool, may not.
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_work, args=(launches[n :: options.processes], options.folder))
        for n in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _file(folder: Path, seeds: Sequence[int]) -> Path:
    return folder / f"{seeds[0]}-{seeds[-1]}.json"


def _work(launches: Sequence[Sequence[int]], folder: Path) -> None:
    for seeds in launches:
        begun, results = time.perf_counter(), []
        for result in run_launch(seeds):
            results.append(asdict(result))
            if result.outcome.kind == WRONG:
                print(f"seed {result.seed}: {result.outcome.text}", flush=True)
        seconds = time.perf_counter() - begun
        kinds = Counter(result["outcome"]["kind"] for result in results)
        print(f"seeds {seeds[0]} to {seeds[-1]}: {dict(kinds)}", file=sys.stderr, flush=True)
        kept = {"commit": commit(), "seconds": seconds, "results": results}
        _file(folder, seeds).write_text(json.dumps(kept), encoding="utf-8")


def _again(seed: int) -> int:
    """Run one combination, and show it."""
    prepare()
    (result,) = run_launch([seed], is_shown=True)
    print(result.text, f"{result.outcome.kind} after {result.outcome.step} numbers", sep="\n")
    print(result.outcome.text, result.outcome.where, sep="\n")
    return int(result.outcome.kind == WRONG)


def _record(options: argparse.Namespace) -> dict[str, Any]:
    """The results in the folder as data."""
    kept = [json.loads(file.read_bytes()) for file in sorted(options.folder.glob("*.json"))]
    results = [
        Result(**{**one, "outcome": Outcome(**one["outcome"])})
        for launch in kept
        for one in launch["results"]
    ]
    ended: dict[str, Counter[str]] = defaultdict(Counter)
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        kind = result.outcome.kind
        causes[kind][result.outcome.cause] += 1
        for habit in {*result.habits, *(f"block: {name}" for name in result.blocks)}:
            ended[habit][kind] += 1
    return {
        "combinations": len(results),
        "seeds": sorted(file.stem for file in options.folder.glob("*.json")),
        "seconds": round(sum(launch["seconds"] for launch in kept) / options.processes),
        "processes": options.processes,
        "commits": sorted({launch["commit"] for launch in kept}),
        "python": platform.python_version(),
        "torch": version("torch"),
        "outcomes": dict(Counter(result.outcome.kind for result in results)),
        "causes": {
            kind: dict(causes[kind].most_common())
            for kind in (REFUSED, BY_TORCH, ON_ONE_DEVICE, WRONG)
        },
        "wrong": [
            {"seed": r.seed, **r.outcome.as_json()} for r in results if r.outcome.kind == WRONG
        ],
        "refused by torch": [
            {"seed": r.seed, "error": r.outcome.text.partition("\n")[0]}
            for r in results
            if r.outcome.kind == BY_TORCH
        ],
        "habits": {name: dict(found) for name, found in sorted(ended.items())},
    }


def _table(record: dict[str, Any]) -> str:
    """Combinations by outcome; one that fails on one device is not compared."""
    rows = ["| ended as | meaning | combinations |", "|---|---|--:|"]
    rows += [
        f"| {kind} | {_MEANINGS[kind]} | {record['outcomes'].get(kind, 0):,} |" for kind in OUTCOMES
    ]
    habits = sum(not name.startswith("block: ") for name in record["habits"])
    blocks = len(record["habits"]) - habits
    kinds = f"{record['combinations']:,} combinations of {habits} habits, {blocks} kinds of blocks"
    return "\n".join([*rows, "", f"{kinds}, in {record['seconds']:,} s."])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.habits", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="combinations")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="run this combination alone, and show it")
    parser.add_argument("--processes", type=int, default=2, help="launches at the same time")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--folder", type=Path, default=Path("build/habits"), help="of launches")
    parser.add_argument("--again", action="store_true", help="discard launches that are kept")
    parser.add_argument(
        "--write", action=argparse.BooleanOptionalAction, default=True, help="the result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
