"""Random training loops with random planned models, compared with one device in float64.

`python -m benchmarks.habits` runs 10,000 combinations on four ranks each, and writes the result
into docs/training.md and benchmarks/habits/result.json. `--seed S` runs one of them again, and shows
what it does.
"""

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.document import caption, commit, replace_table
from benchmarks.habits.launches import LOOPS_PER_MODEL, Result, prepare, run_launch
from benchmarks.habits.outcomes import BY_TORCH, ON_ONE_DEVICE, OUTCOMES, REFUSED, WRONG

_ROOT = Path(__file__).parents[2]
_DOCUMENT = _ROOT / "docs" / "training.md"
_RESULT = Path(__file__).with_name("result.json")
_PER_LAUNCH = 10 * LOOPS_PER_MODEL
_NEWS_EVERY = 200


def main() -> int:
    """Run combinations and write the result; 1 if one was wrong."""
    options = _parser().parse_args()
    if options.seed is not None:
        return _again(options.seed)
    prepare()
    head = caption(f"seeds {options.first} to {options.first + options.count - 1}")
    begun = time.perf_counter()
    results = list(_all(options))
    seconds = time.perf_counter() - begun
    record = _record(results, options, seconds)
    table = _table(record)
    print(table)
    if not options.dry:
        _RESULT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        text = options.document.read_text(encoding="utf-8")
        changed = replace_table(text, "random habits", f"{head}\n\n{table}")
        options.document.write_text(changed, encoding="utf-8")
    return int(bool(record["outcomes"].get(WRONG)))


def _all(options: argparse.Namespace) -> Iterable[Result]:
    """Results of all combinations, printing what is wrong at once."""
    end = options.first + options.count
    launches = [
        range(first, min(first + _PER_LAUNCH, end))
        for first in range(options.first, end, _PER_LAUNCH)
    ]
    # Workers start ranks, which daemons may not.
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(launches[n :: options.processes], queue))
        for n in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    counts = Counter[str]()
    for done in range(1, options.count + 1):
        result = queue.get()
        counts[result.outcome.kind] += 1
        if result.outcome.kind == WRONG:
            print(f"seed {result.seed}: {result.outcome.text}", flush=True)
        if done % _NEWS_EVERY == 0:
            print(f"{done} done: {dict(counts)}", file=sys.stderr, flush=True)
        yield result
    for worker in workers:
        worker.join()


def _work(launches: Sequence[Sequence[int]], queue: Any) -> None:
    for seeds in launches:
        for result in run_launch(seeds):
            queue.put(result)


def _again(seed: int) -> int:
    """Run one combination, and show it."""
    prepare()
    (result,) = run_launch([seed], is_shown=True)
    print(result.text, f"{result.outcome.kind} after {result.outcome.step} numbers", sep="\n")
    print(result.outcome.text, result.outcome.where, sep="\n")
    return int(result.outcome.kind == WRONG)


def _record(
    results: Sequence[Result], options: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """The results as data."""
    ended: dict[str, Counter[str]] = defaultdict(Counter)
    causes: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        kind = result.outcome.kind
        causes[kind][result.outcome.cause] += 1
        for habit in {*result.habits, *(f"block: {name}" for name in result.blocks)}:
            ended[habit][kind] += 1
    return {
        "seeds": [options.first, options.first + options.count - 1],
        "seconds": round(seconds),
        "processes": options.processes,
        "commit": commit(),
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
    rows = ["| ended as | combinations | most frequent causes |", "|---|---|---|"]
    for kind in OUTCOMES:
        causes = record["causes"].get(kind, {})
        most = "; ".join(f"{n:,} `{cause}`" for cause, n in [*causes.items()][:3])
        rows.append(f"| {kind} | {record['outcomes'].get(kind, 0):,} | {most} |")
    habits = sum(not name.startswith("block: ") for name in record["habits"])
    blocks = len(record["habits"]) - habits
    kinds = f"{habits} habits and {blocks} kinds of blocks"
    return "\n".join([*rows, "", f"{kinds}, in {record['seconds']:,} s."])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.habits", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="combinations")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="run this combination alone, and show it")
    parser.add_argument("--processes", type=int, default=2, help="launches at the same time")
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    parser.add_argument("--dry", action="store_true", help="print the result only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
