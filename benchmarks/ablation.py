"""Worth of each technique of the solver: cases solved again without it.

    python -m benchmarks.ablation model.pt2 --meshes 8 2x4 --random 200 --instances A.json.gz

A case is the problem of a model on a mesh, without a limit and, in inference, under one (a share
of the peak without it); an instance of the contest; or a number of random problems together. A
technique is switched off by a setting of the solver, and only in the cases in which it ran. The
first table says which step closed each case, the second what happens without each technique. Times
are those of the processor.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from autoshard import PlanOptions, load_graph, make_mesh
from autoshard.plan.options import Mode
from autoshard.planner.formulation import Formulation
from autoshard.solve import Problem, Progress, SolverSettings, read_iopddl, solve_problem
from benchmarks.random_problems import draw

_GAP = 1e-3
_WORSE = 1e-6
_SLOWER = 1.5
_NOTICEABLE = 0.05
"""Seconds of the processor by which a slower case differs at least."""


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique of the solver.

    Attributes:
        marks: phases, or first parts of names of statistics, of cases in which it runs.
        limits: settings that switch it off.
        hints: false if the hints of repeated structure are removed as well.
    """

    marks: frozenset[str]
    limits: Mapping[str, float]
    hints: bool = True


def _technique(*marks: str, hints: bool = True, **limits: float) -> Technique:
    return Technique(frozenset(marks), limits, hints)


TECHNIQUES = {
    "run contraction": _technique("solve repeated groups", hints=False),
    "restricted problems": _technique("solve a restricted problem", wide_strategies=1e18),
    "elimination of neighbours": _technique(
        "solve repeated groups", "eliminate_neighbours", max_product_work=0
    ),
    "dominance": _technique("solve repeated groups", "drop_dominated", max_dominance_strategies=0),
    "bucket elimination": _technique(
        "solve repeated groups", "solve_low_treewidth", max_total_entries=0
    ),
    "mini-buckets": _technique("mini_buckets", mini_bucket_rounds=0),
    "TRW-S": _technique("trws", trws_rounds=0),
    "search by forests": _technique("forests", huge_entries=1 << 60),
    "branch and bound": _technique("branch and bound", branch_work=0),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Sums over the problems of a case.

    Attributes:
        seconds: of the processor.
        gap: the largest one.
        objective: the sum.
        closed_by: the last phase of the last problem.
        marks: phases, and first parts of names of statistics.
    """

    seconds: float
    gap: float
    objective: float
    closed_by: str
    marks: frozenset[str]


def answered(
    problems: Sequence[Problem], technique: Technique | None, seconds: float, gap: float
) -> Answer:
    """Solve the problems of a case, without a technique unless it is None."""
    settings = replace(SolverSettings(), **(technique.limits if technique else {}))
    phases: list[str] = []

    def listen(progress: Progress) -> None:
        phases.append(progress.phase)

    start, worst, total, marks = time.process_time(), 0.0, 0.0, set[str]()
    for problem in problems:
        given = problem if technique is None or technique.hints else replace(problem, repeats=())
        found = solve_problem(
            given, time_limit=seconds, relative_gap=gap, on_progress=listen, settings=settings
        )
        if found.choice is not None:
            worst, total = max(worst, found.gap), total + found.objective
        elif found.bound < float("inf"):
            worst, total = float("inf"), float("inf")
        marks |= {name.partition(".")[0] for name in found.statistics}
    return Answer(
        time.process_time() - start, worst, total, phases[-1], frozenset(marks | set(phases))
    )


def model_cases(path: Path, meshes: Sequence[str], share: float) -> Iterator[tuple[str, Problem]]:
    """The problems of an exported model."""
    graph = load_graph(path.read_bytes())
    for mesh in meshes:
        for mode in get_args(Mode):
            sizes = tuple(map(int, mesh.split("x")))
            options = PlanOptions(mode=mode)
            problem = Formulation.of(graph, make_mesh(sizes), options).problem
            name = f"{path.name.partition('.')[0]} {mesh} {mode}"
            yield name, problem
            if mode == "inference":
                free = solve_problem(problem, relative_gap=_GAP)
                assert free.choice is not None, "the case without a limit"
                limit = share * problem.peak_usage(free.choice)
                yield f"{name} {share:.0%}", replace(problem, usage_limit=limit)


def main() -> int:
    """Solve all cases with and without each technique, and print the tables in markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path, help="exported models")
    parser.add_argument("--meshes", nargs="+", default=["8", "2x4"])
    parser.add_argument("--share", type=float, default=0.8, help="of the peak, under a limit")
    parser.add_argument("--instances", nargs="*", default=[], type=Path, help="of the contest")
    parser.add_argument("--random", type=int, default=0, help="number of random problems")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one solve")
    options = parser.parse_args()
    answers: dict[str, dict[str, Answer]] = {}

    def examine(name: str, problems: Sequence[Problem], gap: float) -> None:
        base = answered(problems, None, options.seconds, gap)
        answers[name] = {"": base}
        for label, technique in TECHNIQUES.items():
            if base.marks & technique.marks:
                answers[name][label] = answered(problems, technique, options.seconds, gap)
        print(f"{name}: {len(answers[name])} solves", file=sys.stderr, flush=True)

    for path in options.models:
        for name, problem in model_cases(path, options.meshes, options.share):
            examine(name, [problem], _GAP)
    for path in options.instances:
        examine(path.name.partition(".")[0], [read_iopddl(path)], _GAP)
    if options.random:
        examine(
            f"{options.random} random problems", [draw(i)[1] for i in range(options.random)], 1e-6
        )
    print(*closing_table(answers), "", *technique_table(answers), sep="\n")
    return 0


def closing_table(answers: Mapping[str, Mapping[str, Answer]]) -> Iterator[str]:
    """The step that closed each case."""
    yield "| case | last step | gap | of the processor, s |"
    yield "|---|---|---:|---:|"
    for name, found in answers.items():
        base = found[""]
        yield f"| {name} | {base.closed_by} | {base.gap:.3%} | {base.seconds:.2f} |"


def technique_table(answers: Mapping[str, Mapping[str, Answer]]) -> Iterator[str]:
    """Results without each technique."""
    yield "| without | cases | worse gap | slower | faster | time, all of them | worst case |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for label in TECHNIQUES:
        pairs = {name: (x[""], x[label]) for name, x in answers.items() if label in x}
        if not pairs:
            yield f"| {label} | 0 | | | | | |"
            continue
        ratios = {name: off.seconds / on.seconds for name, (on, off) in pairs.items()}
        worse = [name for name, (on, off) in pairs.items() if off.gap > max(on.gap, _GAP) + _WORSE]
        slower = [n for n, (on, off) in pairs.items() if _is_slower(off, on)]
        faster = [n for n, (on, off) in pairs.items() if _is_slower(on, off)]
        times = (sum(pair[i].seconds for pair in pairs.values()) for i in (0, 1))
        most = max(pairs, key=lambda name: (pairs[name][1].gap > _GAP, ratios[name]))
        yield (
            f"| {label} | {len(pairs)} | {len(worse)} | {len(slower)} | {len(faster)} "
            f"| {' to '.join(f'{x:.1f} s' for x in times)} "
            f"| {most}: {ratios[most]:.1f}x, gap {pairs[most][1].gap:.3%} |"
        )


def _is_slower(one: Answer, other: Answer) -> bool:
    return one.seconds > max(_SLOWER * other.seconds, other.seconds + _NOTICEABLE)


if __name__ == "__main__":
    sys.exit(main())
