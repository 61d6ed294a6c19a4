"""Commands that hand plans to other frameworks: export, and those for files of MASE."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli import options
from autoshard.cli.output import console, read_plan, reported
from autoshard.cli.programs import read_program
from autoshard.cli.texts import read_sizes
from autoshard.plan import EXPORT_TARGETS
from autoshard.plan import export_plan as export

mase = typer.Typer(
    no_args_is_help=True, help="Read and write the ilp_solution.pkl of MASE's auto-sharding."
)


def export_plan(
    plan: options.PlanFile,
    *,
    to: Annotated[str, typer.Option(help=f"One of {', '.join(EXPORT_TARGETS)}.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where to write it; printed if left out.")
    ] = None,
) -> None:
    """Write a plan as code or settings of another framework."""
    with reported():
        text = export(read_plan(plan), to)
        if output is not None:
            output.write_text(text, encoding="utf-8")
    if output is None:
        sys.stdout.write(text)


@mase.command("write")
def write_mase(
    plan: options.PlanFile,
    file: Annotated[Path, typer.Argument(help="Where to write the solution.")],
) -> None:
    """Write where a plan's weights and inputs lie as a solution of MASE."""
    from autoshard.mase import solution_of_plan, write_solution  # noqa: PLC0415  it needs torch

    with reported():
        made = read_plan(plan)
        write_solution(solution_of_plan(made), file, made.mesh.axis_sizes)


@mase.command("pins")
def mase_pins(
    file: Annotated[Path, typer.Argument(help="An ilp_solution.pkl that you made yourself.")],
    graph: options.Archive,
    *,
    mesh: Annotated[str, typer.Option(help="Size of each axis of the solution's mesh: 2,4.")],
    trust_pickle: Annotated[
        bool,
        typer.Option(
            "--trust-pickle",
            help="Read the pickle. Only say this of a file that you made yourself: a pickle is a "
            "program.",
        ),
    ] = False,
    no_extrapolate: Annotated[
        bool,
        typer.Option("--no-extrapolate", help="Do not give later layers the first one's places."),
    ] = False,
) -> None:
    """Print a solution of MASE as options of `autoshard plan`, one --pin a line."""
    from autoshard.mase import pins_of_solution, read_solution  # noqa: PLC0415  it needs torch

    with reported():
        solution = read_solution(file, trust_pickle=trust_pickle)
        program = read_program(graph, discover=False)
        sizes = read_sizes(mesh)
        pins = pins_of_solution(solution, program, sizes, extrapolate=not no_extrapolate)
    for kind, table in (("parameter", pins.parameters), ("input", pins.inputs)):
        for name, layout in table.items():
            console.out(f"--pin={kind}:{name}={layout}", highlight=False)
