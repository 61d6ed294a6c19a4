"""Instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

    python benchmarks/iopddl.py asplos-2025-iopddl-A.json.gz:60 asplos-2025-iopddl-G.json.gz:120

Each argument is the path of an instance (from github.com/google/iopddl), optionally with a time
limit in seconds after a colon; the default is that of the contest. The printed table has the
solution, a check of its price against the raw file, and its ratio to the best entry of the contest.
"""

import argparse
import gzip
import json
import re
import sys
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from autoshard.solve import Solution, read_iopddl, solve_problem

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Published:
    """Published values of an instance of the contest (github.com/google/iopddl).

    Attributes:
        model: model, mode and mesh.
        seconds: time limit of the contest.
        best: objective of the best entry.
    """

    model: str
    seconds: float
    best: float


PUBLISHED = {
    "A": Published("GNS, training, 4x8", 60.0, 6_548_641_531.0),
    "G": Published("transformer, inference, 2x16", 120.0, 217_039.0),
    "M": Published("Gemma 1 2B, training, 8x8", 180.0, 49_928_460_991.0),
    "S": Published("U-Net, training, 2x16", 240.0, 1_534_613_444.0),
}
_UNKNOWN = Published("", 60.0, float("nan"))


def published(path: Path) -> Published:
    """The published values of an instance, by the letter in its file name."""
    named = re.search(r"iopddl-([A-Z])\b", path.name)
    return PUBLISHED.get(named.group(1), _UNKNOWN) if named else _UNKNOWN


def evaluated(path: Path, choice: list[int]) -> tuple[float, float, float]:
    """Price, peak usage and usage limit of a choice, computed from the raw file."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data.startswith(_GZIP_MAGIC) else data
    raw: dict[str, Any] = json.loads(text)["problem"]
    costs, usages = raw["nodes"]["costs"], raw["nodes"]["usages"]
    price = float(sum(cost[s] for cost, s in zip(costs, choice, strict=True)))
    for (u, v), matrix in zip(raw["edges"]["nodes"], raw["edges"]["costs"], strict=True):
        price += matrix[choice[u] * len(costs[v]) + choice[v]]
    changes: dict[int, float] = {}
    for (first, last), usage, s in zip(raw["nodes"]["intervals"], usages, choice, strict=True):
        if first < last:
            changes[first] = changes.get(first, 0.0) + usage[s]
            changes[last] = changes.get(last, 0.0) - usage[s]
    peak = max(accumulate(changes[t] for t in sorted(changes)), default=0.0)
    limit = raw.get("usage_limit")
    return price, peak, float("inf") if limit is None else float(limit)


def row(path: Path, solution: Solution, loading: float) -> str:
    """One line of the table."""
    known = published(path)
    checked = "no choice"
    if solution.choice is not None:
        price, peak, limit = evaluated(path, solution.choice.tolist())
        agrees = abs(price - solution.objective) <= 1e-9 * abs(price)
        checked = "yes" if agrees and peak <= limit else f"NO: {price:,.0f}, {peak:,.0f}"
    return (
        f"| {path.name} | {known.model} | {solution.status} | {solution.objective:,.0f} "
        f"| {solution.bound:,.0f} | {solution.gap:.2%} | {solution.objective / known.best:.4f} "
        f"| {checked} | {loading:.1f} | {solution.wall_time:.1f} |"
    )


def main() -> int:
    """Solve the given instances and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("instances", nargs="+", help="PATH or PATH:SECONDS")
    options = parser.parse_args()
    print(
        "| instance | model, mesh | status | objective | bound | gap | to best entry "
        "| checked | loading, s | solving, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for named in options.instances:
        name, _, seconds = named.partition(":")
        path, start = Path(name), time.perf_counter()
        problem = read_iopddl(path)
        loading = time.perf_counter() - start
        limit = float(seconds) if seconds else published(path).seconds
        solution = solve_problem(problem, time_limit=limit)
        print(row(path, solution, loading), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
