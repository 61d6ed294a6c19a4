"""Commands that read plans: show, check, explain, compare, export, and the files of MASE."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autoshard.base.files import write_file
from autoshard.base.outcome import PLAIN_SOLVER
from autoshard.checker import check_plan
from autoshard.cli.options import (
    Archive,
    Connection,
    Notated,
    OutputOptions,
    PlanSource,
    Quiet,
    Within,
    expand_groups,
    read_sizes,
)
from autoshard.cli.progress import followed
from autoshard.cli.rendering.numbers import count, duration
from autoshard.cli.rendering.output import (
    check_output,
    console,
    errors,
    marked,
    print_output,
    write_stdout,
)
from autoshard.cli.rendering.page_output import PageOptions
from autoshard.cli.rendering.plan_output import print_summary
from autoshard.cli.rendering.render import (
    check_report,
    choices_report,
    difference_report,
    explanation_report,
)
from autoshard.cli.rendering.render_plan import SECTIONS, plan_report
from autoshard.client import JobProgress
from autoshard.errors import OptionError, PlanError
from autoshard.exports import EXPORT_TARGETS, export_plan
from autoshard.graph import load_graph
from autoshard.plan import Plan
from autoshard.plan.options import MIN_EXPRESSED
from autoshard.planner import Explanation, OptimalityCheck, check_optimality
from autoshard.report import compare_plans
from autoshard.report.answer import WITHIN
from autoshard.report.choices import find_choices
from autoshard.requests import running
from autoshard.requests.models import read_model
from autoshard.requests.running import load_planned_graph

_EXPLAIN_SECONDS = 60.0

mase = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Read and write the ilp_solution.pkl of MASE's auto-sharding.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """Options that select tables of a plan."""

    panel: ClassVar[str] = "Tables, instead of the summary"
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Placements and gradients of parameters.")
    ] = False
    collectives: Annotated[bool, typer.Option("--collectives", help="Collectives of a step.")] = (
        False
    )
    costs: Annotated[bool, typer.Option("--costs", help="Predicted time of a step.")] = False
    memory: Annotated[bool, typer.Option("--memory", help="Predicted memory at the peak.")] = False
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Pipeline stages.")] = False
    all: Annotated[bool, typer.Option("--all", help="All of these tables.")] = False

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the tables."""
        return tuple(name for name in SECTIONS if self.all or getattr(self, name))


def show(
    plan: PlanSource,
    *,
    sections: Sections,
    page: PageOptions,
    why: Annotated[
        list[str] | None,
        typer.Option(
            "--why",
            metavar="NAME",
            help="Parameter or operator whose alternatives the page shows, as `autoshard explain` "
            "prices them; repeatable.",
            rich_help_panel=PageOptions.panel,
        ),
    ] = None,
    notation: Notated = "dtensor",
    within: Within = WITHIN,
    output: OutputOptions,
    connection: Connection,
) -> None:
    """Show the summary of a plan, its tables, or a page to look into."""
    made = connection.read_plan(plan)
    if why and not page.wanted:
        raise OptionError("--why is for a page: give --html FILE or --open too")
    if page.wanted:
        with followed(quiet=not why, can_stop=False):
            found = [_explanation(connection, plan, made, name) for name in why or ()]
        page.write(made, plan, explanations=found, within=within)
        return
    if not made.found or not (sections.chosen or output.chosen != "table"):
        print_summary(made, source=plan, within=within)
        return
    report = plan_report(made, sections.chosen or SECTIONS, notation=notation)
    print_output(report, output.chosen)


def check(
    graph: Annotated[Path, typer.Argument(help="The archive that was planned.")],
    plan: PlanSource,
    *,
    optimality: Annotated[
        bool,
        typer.Option(
            "--optimality",
            help="Also solve the problem of the plan once more, with a plain solver and without "
            "reductions, and compare the result with the certificate.",
        ),
    ] = False,
    solver: Annotated[
        str,
        typer.Option(
            metavar="ilp|NAME",
            help="The plain solver: ilp for HiGHS, or another one that cvxpy finds.",
        ),
    ] = PLAIN_SOLVER,
    time_limit: Annotated[
        float, duration(help="Time limit of the plain solver.", unit="seconds")
    ] = 600.0,
    output: OutputOptions,
    connection: Connection,
) -> None:
    """Check a plan against its graph: every layout valid, the predicted cost correct."""
    made = connection.read_plan(plan)
    program = load_planned_graph(read_model(graph), made)
    findings = check_plan(made, program)
    checks: tuple[OptimalityCheck, ...] = ()
    if optimality and not findings:
        checks = check_optimality(made, program, solver=solver, time_limit=time_limit)
        findings = tuple(text for found in checks for text in found.contradictions)
    for finding in findings:
        errors.print(marked("wrong:", finding), soft_wrap=True)
    print_output(check_report(findings, checks, as_text=output.chosen == "table"), output.chosen)
    if findings:
        raise typer.Exit(1)


def explain(
    plan: PlanSource,
    name: Annotated[
        str,
        typer.Argument(
            help="A node, parameter, input, value or output; or a module path or pattern, such as "
            "'transformer.h.*.mlp', to list what it stands for."
        ),
    ],
    *,
    value: Annotated[
        bool, typer.Option("--value", help="Explain the value, if a node shares its name.")
    ] = False,
    limit: Annotated[int, count(help="Maximum rows.")] = 20,
    time_limit: Annotated[
        float,
        duration(help="Seconds for alternatives that must be planned anew.", unit="seconds"),
    ] = _EXPLAIN_SECONDS,
    quiet: Quiet = False,
    notation: Notated = "dtensor",
    output: OutputOptions,
    connection: Connection,
) -> None:
    """Show every alternative of one choice of a plan, with its cost."""
    made = connection.read_plan(plan)
    found = find_choices(made, name)
    if len(found) == 1:
        name = found[0].name
    elif found and all(choice.name != name for choice in found):
        choices = choices_report(name, found, limit=limit, notation=notation)
        print_output(choices, output.chosen)
        return
    with followed(quiet=quiet, can_stop=False) as run:
        run.report(JobProgress(phase=f"pricing the alternatives of {name}", elapsed=0.0))
        explanation = _explanation(connection, plan, made, name, value=value, time_limit=time_limit)
    report = explanation_report(explanation, made.performance, limit=limit, notation=notation)
    print_output(report, output.chosen)


def _explanation(
    connection: Connection,
    source: str,
    made: Plan,
    name: str,
    *,
    value: bool = False,
    time_limit: float = _EXPLAIN_SECONDS,
) -> Explanation:
    """Price the alternatives of one choice, at the service or here."""
    if not connection.server:
        return running.explain(made, name, value=value, time_limit=time_limit)[0]
    with connection.open() as client:
        plan = connection.plan_or_id(source)
        return client.explain(plan, name, value=value, time_limit=time_limit)


def compare(
    before: PlanSource,
    after: Annotated[str, typer.Argument(help="Another plan of the same graph.")],
    *,
    page: PageOptions,
    notation: Notated = "dtensor",
    output: OutputOptions,
    connection: Connection,
) -> None:
    """Show the differences between two plans of one graph.

    The page is that of the second plan, with the difference from the first.
    """
    if page.wanted:
        page.write(connection.read_plan(after), after, other=connection.read_plan(before))
        return
    if connection.server:
        with connection.open() as client:
            plans = connection.plan_or_id(before), connection.plan_or_id(after)
            difference = client.compare(*plans)
    else:
        difference = compare_plans(connection.read_plan(before), connection.read_plan(after))
    print_output(difference_report(difference, notation=notation), output.chosen)


def export(
    plan: PlanSource,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="|".join(EXPORT_TARGETS),
            autocompletion=lambda: list(EXPORT_TARGETS),
            help="The framework, and how it takes the plan.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", callback=check_output, help="File for the export; default: stdout."
        ),
    ] = None,
    min_expressed: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the plan that the target must express, from 0 to 1."
        ),
    ] = MIN_EXPRESSED,
    price: Annotated[
        bool,
        typer.Option(
            "--price/--no-price",
            help="Say what the exported settings cost as the framework runs them, and how many "
            "collectives are the plan's; it takes up to half a minute, in this process.",
        ),
    ] = True,
    connection: Connection,
) -> None:
    """Export a plan as code or settings of another framework.

    The first line says what share of the plan the target expresses. It fails if that is too
    little: then plan again with --exportable-to.
    """
    if connection.server:
        with connection.open() as client:
            source = connection.plan_or_id(plan)
            text = client.export(source, to, min_expressed=min_expressed)
    else:
        made = connection.read_plan(plan)
        text = export_plan(made, to, min_expressed=min_expressed)
        if price and EXPORT_TARGETS[to].expresses is not None:
            text = _priced(made, to, text, min_expressed)
    if output is None:
        write_stdout(text)
    else:
        write_file(output, text)


def _priced(plan: Plan, target: str, text: str, min_expressed: float) -> str:
    """The exported text with the price of its result; if it has none, stderr says why."""
    # The planner is loaded only where it plans.
    from autoshard.requests.export_results import export_result  # noqa: PLC0415

    try:
        result = export_result(plan, target)
    except PlanError as error:
        errors.print(str(error), highlight=False, soft_wrap=True)
        return text
    return export_plan(plan, target, min_expressed=min_expressed, result=result)


@mase.command("write")
@expand_groups
def write_mase(
    plan: PlanSource,
    file: Annotated[Path, typer.Argument(callback=check_output, help="File for the solution.")],
    *,
    connection: Connection,
) -> None:
    """Write the placements of a plan's weights and inputs as a solution of MASE."""
    from autoshard.exports.mase import solution_of_plan, write_solution  # noqa: PLC0415  it needs torch

    made = connection.read_plan(plan)
    write_solution(solution_of_plan(made), file, made.mesh.axis_sizes)


@mase.command("pins")
def mase_pins(
    file: Annotated[Path, typer.Argument(help="An ilp_solution.pkl that you made yourself.")],
    graph: Archive,
    *,
    mesh: Annotated[str, typer.Option(help="Size of each axis of the solution's mesh: 2,4.")],
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle",
            help="Read the pickle. Only for a file that you made yourself: a pickle is a program.",
        ),
    ] = False,
    no_extrapolate: Annotated[
        bool,
        typer.Option(
            "--no-extrapolate", help="Do not give later layers the placements of the first."
        ),
    ] = False,
) -> None:
    """Print a solution of MASE as options of `autoshard plan`, one --pin a line."""
    from autoshard.exports.mase import pins_of_solution, read_solution  # noqa: PLC0415  it needs torch

    solution = read_solution(file, trust_pickle=trust_pickle)
    sizes, program = read_sizes(mesh), load_graph(graph)
    pins = pins_of_solution(solution, program, sizes, extrapolate=not no_extrapolate)
    for kind, table in (("parameter", pins.parameters), ("input", pins.inputs)):
        for name, layout in table.items():
            console.out(f"--pin={kind}:{name}={layout}", highlight=False)
