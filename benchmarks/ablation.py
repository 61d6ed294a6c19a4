"""Worth of each technique of the solver: cases solved again without it.

    python -m benchmarks.ablation bert-base t5-base --meshes 8 2x4 2x2x2 --random 300
        --budgets llama3-8b:2x4:60e9 --instances A.json.gz --document benchmarks/results/ablation.md

A case is the problem of a model on a mesh, in training and in inference, without a limit; the
search of a plan in training under a memory budget; an instance of the contest; or a number of
random problems together. A technique is switched off by settings of the solver, or one of its
functions is replaced by one that does nothing, and only in the cases in which it runs. The first
table says which step closed each case, the second what happens without each technique. Times are
those of the processor in the solver.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from autoshard import PlanOptions, load_graph, make_mesh, make_plan
from autoshard.plan.options import Mode
from autoshard.planner.budget import solver as budget_solver
from autoshard.planner.formulation.formulation import Formulation
from autoshard.solve import Problem, Solution, SolverSettings, read_iopddl, solve_problem, solver
from autoshard.solve.bounds.trws import TRWS
from autoshard.solve.local_search import CoordinateDescent
from autoshard.solve.presolve import (
    DropDominated,
    EliminateNeighbours,
    SubstituteVariables,
    nothing_to_undo,
)
from autoshard.solve.programs.restricted_problem import LimitedRestriction, RestrictedSolver
from autoshard.solve.runs import block_table, contraction, limited
from autoshard.solve.runs.contraction import ContractedProblem
from autoshard.solve.runs.group_master import GroupMaster
from benchmarks.archives import archive
from benchmarks.document import caption, replace_table
from benchmarks.random_families import draw

_GAP = 1e-3
_WORSE = 1e-5
_SLOWER = 1.5
_NOTICEABLE = 0.05
"""Seconds of the processor by which a slower case differs at least."""


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique of the solver.

    Attributes:
        owner: class or module with a function that is called if the technique runs.
        function: its name.
        limits: settings that switch the technique off.
        stub: replaces the function, unless it is None.
        hints: false to remove the hints of repeated structure, too.
    """

    owner: Any
    function: str
    limits: Mapping[str, Any] = field(default_factory=dict)
    stub: Callable[..., object] | None = None
    hints: bool = True


def _nothing(*_: object, **__: object) -> None:
    """Replaces a function that need not return anything."""


def _unchanged(*_: object) -> object:
    """Replaces a reduction."""
    return nothing_to_undo


TECHNIQUES = {
    "run contraction": Technique(contraction, "write_choices", hints=False),
    "a table for each component of a group": Technique(block_table, "_ways", stub=lambda *_: []),
    "shared nodes as costs": Technique(
        ContractedProblem,
        "_best_shared",
        {"max_group_work": SolverSettings().max_elimination_work},
    ),
    "restricted problems": Technique(
        RestrictedSolver, "minimise", {"wide_strategies": float("inf")}
    ),
    "restricted problems under a limit": Technique(
        LimitedRestriction, "run", {"wide_strategies": float("inf")}
    ),
    "combination of groups": Technique(GroupMaster, "combine", stub=_nothing),
    "branching on numbers of groups": Technique(limited, "branch_on_counts", stub=_nothing),
    "substitution of variables": Technique(SubstituteVariables, "apply", stub=_unchanged),
    "elimination of neighbours": Technique(
        EliminateNeighbours, "_eliminate", {"max_product_work": 0}
    ),
    "dominance": Technique(DropDominated, "apply", {"max_dominance_strategies": 0}),
    "TRW-S": Technique(TRWS, "run", {"trws_rounds": 0}),
    "search by forests": Technique(solver, "search_forests", stub=_nothing),
    "repair of choices": Technique(CoordinateDescent, "repair", stub=_nothing),
    "linear relaxation": Technique(solver, "_relax", stub=lambda _: True),
    "branch and bound": Technique(solver, "_search_tree", {"branch_work": 0}),
}


@dataclass(eq=False, slots=True)
class Answer:
    """Sums over the solves of a case.

    Attributes:
        seconds: of the processor in the solver.
        gap: the largest one; of the plan, if the case is the search of one.
        closed_by: the last phase of the last solve.
        ran: names of the techniques that ran, if they were watched.
    """

    seconds: float = 0.0
    gap: float = 0.0
    closed_by: str = ""
    ran: set[str] = field(default_factory=set)


class _Stopwatch:
    """A cancel token that is set after some seconds of the processor.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.process_time() + seconds

    def is_set(self) -> bool:
        return time.process_time() > self._end


Solve = Callable[..., Solution]
Case = Callable[[Solve], float]
"""Solves a case with a given function in place of `solve_problem`; returns the gap."""


def answered(case: Case, technique: Technique | None, seconds: float) -> Answer:
    """Solve a case, without a technique unless it is None; then the techniques are watched.

    Args:
        case: the case.
        technique: to switch off.
        seconds: of the processor after which the case is cancelled.
    """
    answer, stopwatch = Answer(), _Stopwatch(seconds)

    def solve(problem: Problem, **arguments: Any) -> Solution:
        def listen(progress: Any) -> None:
            answer.closed_by = progress.phase

        arguments |= {"on_progress": listen, "cancel": stopwatch}
        if technique is not None:
            arguments["settings"] = replace(SolverSettings(), **technique.limits)
        # A new object has no properties that an earlier solve computed.
        hints = problem.repeats if technique is None or technique.hints else ()
        start = time.process_time()
        found = solve_problem(replace(problem, repeats=hints), **arguments)
        answer.seconds += time.process_time() - start
        return found

    with _watched(answer.ran) if technique is None else _stubbed(technique):
        answer.gap = case(solve)
    return answer


@contextmanager
def _stubbed(technique: Technique) -> Iterator[None]:
    """Replace the function of a technique in a `with` block."""
    old = getattr(technique.owner, technique.function)
    if technique.stub is not None:
        setattr(technique.owner, technique.function, technique.stub)
    try:
        yield
    finally:
        setattr(technique.owner, technique.function, old)


@contextmanager
def _watched(ran: set[str]) -> Iterator[None]:
    """Record the techniques whose functions are called in a `with` block."""
    old = {name: getattr(x.owner, x.function) for name, x in TECHNIQUES.items()}

    def watching(name: str) -> Callable[..., object]:
        def call(*arguments: Any, **named: Any) -> object:
            ran.add(name)
            return old[name](*arguments, **named)

        return call

    for name, x in TECHNIQUES.items():
        if getattr(x.owner, x.function) is old[name]:
            setattr(x.owner, x.function, watching(name))
    try:
        yield
    finally:
        for name, x in TECHNIQUES.items():
            setattr(x.owner, x.function, old[name])


def problems(given: Sequence[Problem], gap: float) -> Case:
    """Problems solved one after the other."""

    def case(solve: Solve) -> float:
        worst = 0.0
        for problem in given:
            found = solve(problem, relative_gap=gap)
            if found.choice is not None:
                worst = max(worst, found.gap)
            elif found.bound < float("inf"):
                worst = float("inf")
        return worst

    return case


def search(path: Path, mesh: tuple[int, ...], memory_budget: float) -> Case:
    """The search of a plan for training under a memory budget."""
    graph = load_graph(path.read_bytes())
    options = PlanOptions(memory_budget=int(memory_budget), relative_gap=_GAP, time_limit=600.0)

    def case(solve: Solve) -> float:
        old = budget_solver.solve_problem
        budget_solver.solve_problem = solve
        try:
            gap = make_plan(graph, make_mesh(mesh), options).certificate.gap
        finally:
            budget_solver.solve_problem = old
        return float("inf") if gap is None else gap

    return case


def _mesh(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """All cases and their names."""
    for model in options.models:
        graph = load_graph(archive(model, options.folder).read_bytes())
        for mesh, mode in product(options.meshes, options.modes):
            given = Formulation.of(graph, make_mesh(_mesh(mesh)), PlanOptions(mode=mode)).problem
            yield f"{Path(model).stem}, {mesh}, {mode}", problems([given], _GAP)
    for named in options.budgets:
        model, mesh, budget = named.split(":")
        case = search(archive(model, options.folder), _mesh(mesh), float(budget))
        yield f"{Path(model).stem}, {mesh}, training, {float(budget) / 1e9:g} GB", case
    if options.random:
        drawn = [draw(seed)[1] for seed in range(options.random)]
        yield f"{options.random} random problems", problems(drawn, 1e-6)
    for path in options.instances:
        yield path.name.partition(".")[0], problems([read_iopddl(path)], 1e-6)


def main() -> int:
    """Solve all cases with and without each technique; print the tables or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of benchmarks.models, or archives")
    parser.add_argument("--meshes", nargs="+", default=["8", "2x4"])
    parser.add_argument("--budgets", nargs="*", default=[], help="MODEL:MESH:BYTES")
    parser.add_argument("--instances", nargs="*", default=[], type=Path, help="of the contest")
    parser.add_argument("--random", type=int, default=0, help="number of random problems")
    parser.add_argument("--modes", nargs="+", default=get_args(Mode), choices=get_args(Mode))
    parser.add_argument("--seconds", type=float, default=60.0, help="of the processor, per case")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/models"))
    parser.add_argument("--document", type=Path, help="gets the tables, after each case")
    parser.add_argument("--table", default="ablation", help="name of the place in the document")
    options = parser.parse_args()
    below = caption(f"`python -m benchmarks.ablation {' '.join(sys.argv[1:])}`")
    answers: dict[str, dict[str, Answer]] = {}
    for name, case in cases(options):
        base = answered(case, None, options.seconds)
        ran = {x: technique for x, technique in TECHNIQUES.items() if x in base.ran}
        found = {x: answered(case, technique, options.seconds) for x, technique in ran.items()}
        answers[name] = {"": base, **found}
        tables = "\n".join([*closing_table(answers), "", *technique_table(answers), "", below])
        print(f"{name}: {len(answers[name])} times", file=sys.stderr, flush=True)
        if options.document is not None:
            text = options.document.read_text(encoding="utf-8")
            options.document.write_text(
                replace_table(text, options.table, tables), encoding="utf-8"
            )
    if options.document is None:
        print(tables)
    return 0


def closing_table(answers: Mapping[str, Mapping[str, Answer]]) -> Iterator[str]:
    """The step that closed each case."""
    yield "| case | last step | gap | seconds |"
    yield "|---|---|---:|---:|"
    for name, found in answers.items():
        base = found[""]
        yield f"| {name} | {base.closed_by} | {base.gap:.3%} | {base.seconds:.2f} |"


def technique_table(answers: Mapping[str, Mapping[str, Answer]]) -> Iterator[str]:
    """Results without each technique."""
    yield "| without | cases | worse gap | slower | faster | seconds, all of them | worst case |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for label in TECHNIQUES:
        pairs = {name: (x[""], x[label]) for name, x in answers.items() if label in x}
        if not pairs:
            continue
        ratios = {name: off.seconds / on.seconds for name, (on, off) in pairs.items()}
        worse = [name for name, (on, off) in pairs.items() if off.gap > max(on.gap, _GAP) + _WORSE]
        slower = [n for n, (on, off) in pairs.items() if _is_slower(off, on)]
        faster = [n for n, (on, off) in pairs.items() if _is_slower(on, off)]
        times = (sum(pair[i].seconds for pair in pairs.values()) for i in (0, 1))
        most = max(pairs, key=lambda name: (max(pairs[name][1].gap, _GAP), ratios[name]))
        yield (
            f"| {label} | {len(pairs)} | {len(worse)} | {len(slower)} | {len(faster)} "
            f"| {' to '.join(f'{x:.1f}' for x in times)} "
            f"| {most}: {ratios[most]:.1f}x, gap {pairs[most][1].gap:.3%} |"
        )


def _is_slower(one: Answer, other: Answer) -> bool:
    return one.seconds > max(_SLOWER * other.seconds, other.seconds + _NOTICEABLE)


if __name__ == "__main__":
    sys.exit(main())
