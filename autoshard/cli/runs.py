"""Commands about running plans: simulate, launch, calibrate, profile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.text import Text

from autoshard.cli import options
from autoshard.cli.output import console, errors, read_plan, reported
from autoshard.cli.programs import import_modules
from autoshard.cli.remote import fetched_plan
from autoshard.cli.render_runs import render_calibration, render_profile, render_simulation
from autoshard.cli.texts import read_sizes
from autoshard.errors import LaunchError, OptionError
from autoshard.mesh import topology_to_json
from autoshard.plan.simulation import chrome_trace, simulate


def simulate_plan(
    plan: options.PlanFile,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Where to write the step for Perfetto or chrome://tracing."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Most rows of what takes longest.")] = 12,
) -> None:
    """Show one step of a plan over time: lanes of compute and communication, and memory."""
    with reported():
        simulation = simulate(read_plan(plan))
        if output is not None:
            output.write_text(chrome_trace(simulation), encoding="utf-8")
    console.print(render_simulation(simulation, most=limit))


PASSED_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Settings of a command whose arguments torchrun's own parser reads."""


def launch(context: typer.Context) -> None:
    """Run a program on the devices of a plan: --plan plan.json [torchrun's options] PROGRAM.

    The plan may also be an id or an address of a service (http://HOST:PORT/v1/plans/ID); where the
    service is down, a plan that was fetched or asked for here before is used.
    """
    from autoshard.runtime.launch.command import run_command  # noqa: PLC0415  it needs torch

    with _ranks_reported(), TemporaryDirectory(prefix="autoshard-plan-") as folder:
        run_command(context.args, find=lambda text: fetched_plan(text, Path(folder)))


def calibrate(
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the topology.")],
    mesh: Annotated[
        str | None,
        typer.Option(help="Axes to measure: 2,4. By default nodes by ranks per node."),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the topology.")] = "calibrated",
    nproc: Annotated[
        int | None,
        typer.Option(help="Start so many ranks here. Without it, run the command under torchrun."),
    ] = None,
    busy: Annotated[
        bool,
        typer.Option(
            "--busy",
            help="The machine has other work: count the processor time that collectives take.",
        ),
    ] = False,
) -> None:
    """Measure links and devices on the ranks, and write a topology for --topology."""
    from autoshard.runtime import calibration  # noqa: PLC0415  it needs torch

    if nproc is not None:
        from autoshard.runtime.launch.command import run_module  # noqa: PLC0415  as above

        shape = ["--mesh", mesh] if mesh else []
        counted = ["--busy"] if busy else []
        arguments = ["calibrate", "--output", str(output), "--name", name, *shape, *counted]
        with _ranks_reported():
            run_module("autoshard.cli", arguments, num_ranks=nproc)
        return
    with reported():
        if "WORLD_SIZE" not in os.environ:
            raise OptionError(
                "calibrate runs on all ranks at once: give --nproc for those of this machine, or "
                "start it with torchrun, as in `torchrun --nproc-per-node 4 -m autoshard.cli "
                "calibrate -o topology.json`"
            )
        sizes = None if mesh is None else read_sizes(mesh)
        with calibration.process_groups() as is_first:
            report = console.print if is_first else (lambda _: None)
            found = calibration.calibrate(sizes, name=name, busy=busy, report=report)
        if is_first:
            output.write_text(topology_to_json(found.topology), encoding="utf-8")
            console.print(render_calibration(found))


def profile_plan(
    plan: options.PlanFile,
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write predicted and measured for Perfetto."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to measure; medians count.")] = 5,
    limit: Annotated[int, typer.Option(help="Most rows of the table.")] = 30,
    modules: options.Import = None,
    custom: options.CustomOperator = None,
) -> None:
    """Run a plan with made-up numbers, and show predicted beside measured times.

    Starts a rank per device on this machine; under `autoshard launch` or torchrun it joins them.
    """
    from autoshard.runtime import launch as launcher  # noqa: PLC0415  it needs torch
    from autoshard.runtime.launch.command import run_module  # noqa: PLC0415  as above
    from autoshard.runtime.profiling import profile  # noqa: PLC0415  as above

    with _ranks_reported():
        made = read_plan(plan)
        if "WORLD_SIZE" not in os.environ:
            written = [] if output is None else ["--output", str(output)]
            counts = [f"--steps={steps}", f"--limit={limit}"]
            own = [f"--import={name}" for name in modules or ()]
            own += [f"--custom-operator={name}" for name in custom or ()]
            launcher.check_world(made, made.mesh.num_devices)
            arguments = ["profile", str(plan), *counts, *own, *written]
            run_module("autoshard.cli", arguments, num_ranks=made.mesh.num_devices)
            return
        joined = launcher.join(made)
        import_modules(modules or ())
        found = profile(joined, num_steps=steps, custom_operators=custom or ())
        if joined.rank == 0:
            if output is not None:
                trace = chrome_trace(found.simulation, found.events)
                output.write_text(trace, encoding="utf-8")
            console.print(render_profile(found, most=limit))
        joined.close()


@contextmanager
def _ranks_reported() -> Iterator[None]:
    """As `reported`; what a rank raised is shown as it is."""
    with reported():
        try:
            yield
        except LaunchError as error:
            errors.print(Text(f"error: {error}", style="bold red"), soft_wrap=True)
            raise typer.Exit(1) from None
