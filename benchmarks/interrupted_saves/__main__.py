"""Saves of checkpoints that are killed, whose disk is full, or of which one system call fails.

`python -m benchmarks.interrupted_saves` saves with planned models on two ranks, over a checkpoint
that is there, and writes the result into docs/reliability.md and benchmarks/results. It first lists
the system calls with which a save changes files. Then strace kills a rank at one of them, or lets
it fail. New ranks load what is left: it must be the former checkpoint or the new one, whole; and
all ranks must have ended, each of those that live with an error, or each without. The next save
must succeed, and leave nothing behind.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.document import caption, commit, write_table
from benchmarks.interrupted_saves.subjects import FORMER, NEW, NUM_RANKS, SUBJECTS
from benchmarks.interrupted_saves.trials import FAULTS, Call, Trial, formers, prepare, trials

_ROOT = Path(__file__).parents[2]
_DOCUMENT = _ROOT / "docs" / "reliability.md"
_RESULT = Path(__file__).parents[1] / "results" / "interrupted_saves.json"


def main() -> int:
    """Run trials and write the result; 1 if one was wrong."""
    options = _parser().parse_args()
    head = caption(f"{NUM_RANKS} ranks, seed {options.seed}")
    if options.again:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare()
    with TemporaryDirectory(prefix="former-") as name:
        places = formers(Path(name), options.only or [*SUBJECTS])
        drawn = list(trials(places, options.count, options.seed))
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=_work, args=(drawn, places, options, number))
            for number in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    kept = [json.loads(path.read_bytes()) for path in sorted(options.folder.glob("*.json"))]
    done = [Trial(**{**one["trial"], "call": Call(**one["trial"]["call"])}) for one in kept]
    print(_table(done))
    summary = _summary(done, sum(one["seconds"] for one in kept))
    print(summary)
    if options.write:
        lines = ",\n".join(map(json.dumps, kept))
        _RESULT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        write_table(_DOCUMENT, "interrupted saves", f"{head}\n\n{summary}")
    return int(len(done) < options.count or any(trial.wrong for trial in done))


def _work(
    drawn: Sequence[Trial], places: Mapping[str, Path], options: argparse.Namespace, first: int
) -> None:
    """Run each of several workers' trials whose result is not in the folder yet."""
    for number in range(first, len(drawn), options.processes):
        file = options.folder / f"{options.seed}-{number:05}.json"
        if file.exists():
            continue
        begun, trial = time.perf_counter(), drawn[number]
        trial.run(places[trial.subject])
        if trial.wrong:
            print(f"{number}: {trial}", flush=True)
        seconds = round(time.perf_counter() - begun, 1)
        result = {"commit": commit(), "seconds": seconds, "trial": asdict(trial)}
        file.write_text(json.dumps(result), encoding="utf-8")


def _table(done: Sequence[Trial]) -> str:
    rows = [
        "| save | fault | trials | former checkpoint | new one | neither, or a rank waits |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for subject in dict.fromkeys(trial.subject for trial in done):
        for fault in FAULTS:
            own = [t for t in done if (t.subject, t.fault) == (subject, fault)]
            rows.append(f"| `{subject}` | {fault} | {_counts(own)} |")
    return "\n".join(rows)


def _summary(done: Sequence[Trial], seconds: float) -> str:
    """The trials of each fault, for the page."""
    rows = [
        "| fault | trials | former checkpoint | new one | neither, or a rank waits |",
        "|---|--:|--:|--:|--:|",
        *(f"| {fault} | {_counts([t for t in done if t.fault == fault])} |" for fault in FAULTS),
    ]
    calls = len({(t.subject, t.call.rank, t.call.name, t.call.number) for t in done})
    total = f"{len(done):,} trials at {calls:,} system calls, which took {seconds:,.0f} s."
    return "\n".join([*rows, "", total])


def _counts(trials: Sequence[Trial]) -> str:
    wrong = sum(bool(t.wrong) for t in trials)
    left = Counter(t.left for t in trials if not t.wrong)
    return f"{len(trials)} | {left[FORMER]} | {left[NEW]} | {wrong}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interrupted_saves", description=__doc__
    )
    parser.add_argument("--count", type=int, default=216, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--processes", type=int, default=2, help="trials at the same time")
    parser.add_argument("--folder", type=Path, default=Path("build/interrupted-saves"))
    parser.add_argument("--again", action="store_true", help="discard trials that are kept")
    parser.add_argument("--only", nargs="+", choices=[*SUBJECTS], help="not all kinds of saves")
    parser.add_argument(
        "--write", action=argparse.BooleanOptionalAction, default=True, help="the result"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
