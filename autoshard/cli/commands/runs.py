"""Commands that run plans or predict runs: simulate, launch, calibrate, profile."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from autoshard.base.files import write_file
from autoshard.cli.options import (
    Connection,
    CustomOperator,
    Import,
    OutputOptions,
    PlanSource,
    environment_connection,
    import_modules,
    read_sizes,
    read_topology,
)
from autoshard.cli.progress import calibration_progress
from autoshard.cli.rendering.numbers import count
from autoshard.cli.rendering.output import check_output, errors, marked, print_output
from autoshard.cli.rendering.render import (
    calibration_report,
    profile_report,
    simulation_report,
)
from autoshard.cli.rendering.render_pipeline import schedule_report
from autoshard.errors import OptionError
from autoshard.mesh import Topology as TopologyOfPlan
from autoshard.mesh import get_topology, topology_to_json
from autoshard.mesh.sources import preset_of_device
from autoshard.plan import only_stage
from autoshard.plan.stage_plans import stage_plan
from autoshard.pricing import chrome_trace
from autoshard.pricing import simulate as simulate_plan
from autoshard.report import schedule_svg, schedule_trace
from autoshard.schedules import simulate_pipeline

Trace = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        callback=check_output,
        help="File for the trace, for Perfetto or chrome://tracing.",
    ),
]
Limit = Annotated[int, count(help="Maximum rows.")]


Picture = Annotated[
    Path | None,
    typer.Option(
        "--svg", callback=check_output, help="File for a picture of a pipeline's schedule."
    ),
]


OneStage = Annotated[
    int | None,
    count(
        "--stage",
        help="Show the operators and collectives of this stage of a pipeline, as if it had nothing "
        "to wait for.",
        least=0,
    ),
]


def simulate(
    plan: PlanSource,
    *,
    output: Trace = None,
    svg: Picture = None,
    stage: OneStage = None,
    limit: Limit = 12,
    output_format: OutputOptions,
    connection: Connection,
) -> None:
    """Show one step of a plan over time: compute, communication and memory; a pipeline by rank."""
    made = connection.read_plan(plan)
    if stage is not None:
        made, _ = stage_plan(made, stage)
    if made.pipeline is not None:
        schedule = simulate_pipeline(made)
        trace, shown = schedule_trace(schedule), schedule_report(made.pipeline, schedule)
        if svg is not None:
            write_file(svg, schedule_svg(schedule))
    elif svg is not None:
        raise OptionError(
            "--svg draws the schedule of a pipeline, and this is one stage: write a trace with -o"
        )
    else:
        simulation = simulate_plan(made)
        trace, shown = chrome_trace(simulation), simulation_report(simulation, limit=limit)
    if output is not None:
        write_file(output, trace)
    print_output(shown, output_format.chosen)


def launch(context: typer.Context) -> None:
    """Run a program on the devices of a plan: --plan plan.json [torchrun's options] PROGRAM.

    The plan may also be an id or an address of a service (http://HOST:PORT/v1/plans/ID). If the
    service is down, a plan that was fetched or requested here before is used.
    """
    from autoshard.launching.command import run_command  # noqa: PLC0415  it needs torch

    with TemporaryDirectory(prefix="autoshard-plan-") as folder:
        run_command(context.args, find=lambda source: fetch_plan_file(source, Path(folder)))


def fetch_plan_file(source: str, folder: Path) -> Path:
    """Return the file of a plan; a plan with an id or an address is written to a folder first.

    Raises:
        OptionError: as `Connection.read_plan`.
        ServiceError: as `Connection.read_plan`.
    """
    if Path(source).exists() or source.endswith(".json"):
        return Path(source)
    path = folder / "plan.json"
    path.write_text(environment_connection().read_plan(source).to_json(), encoding="utf-8")
    return path


def calibrate(
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=check_output, help="File for the topology.")
    ],
    mesh: Annotated[
        str | None,
        typer.Option(help="Axes to measure: 2,4; default: nodes by ranks per node."),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="Measure the device only, and take the links of this topology (name or .json "
            "file); for a single device."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the topology.")] = "calibrated",
    nproc: Annotated[
        int | None,
        count(help="Number of ranks to start here; without it, use torchrun."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure fewer sizes, and each less often.")
    ] = False,
    busy: Annotated[
        bool,
        typer.Option(
            "--busy",
            help="The machine has other work: count the processor time that collectives take.",
        ),
    ] = False,
    output_format: OutputOptions,
) -> None:
    """Measure links and devices on the ranks, and write a topology for --topology.

    Measurements are kept in a file beside the output (FILE.partial) until the topology is
    written: after an interruption, the same command continues.
    """
    from autoshard.launching.command import run_module  # noqa: PLC0415  as above
    from autoshard.measure import calibration  # noqa: PLC0415  as above

    if nproc is not None:
        arguments = ["--output", str(output), "--name", name]
        arguments += ["--mesh", mesh] if mesh else []
        arguments += ["--links", links] if links else []
        arguments += ["--quick"] * quick + ["--busy"] * busy
        arguments.append(f"--format={output_format.chosen}")
        run_module("autoshard.cli", ["calibrate", *arguments], num_ranks=nproc)
        return
    if "WORLD_SIZE" not in os.environ:
        raise OptionError(
            "calibrate runs on all ranks at once: give --nproc for those of this machine, or "
            "start it with torchrun, as in `torchrun --nproc-per-node 4 -m autoshard.cli "
            "calibrate -o topology.json`"
        )
    sizes = None if mesh is None else read_sizes(mesh)
    known = read_topology(links)
    partial = output.with_name(f"{output.name}.partial")
    with (
        calibration.process_groups() as is_first,
        calibration_progress(is_first=is_first) as report,
    ):
        found = calibration.calibrate(
            sizes,
            links=get_topology(known) if isinstance(known, str) else known,
            name=name,
            effort=calibration.QUICK if quick else calibration.FULL,
            busy=busy,
            partial_file=partial,
            report=report,
        )
    if is_first:
        write_file(output, topology_to_json(found.topology))
        partial.unlink(missing_ok=True)
        print_output(calibration_report(found), output_format.chosen)


def _say_other_devices(planned: TopologyOfPlan) -> None:
    """Say that measured and predicted times are of different devices, if they are."""
    import torch  # noqa: PLC0415  as above

    name = "CPUs"
    if planned.backend == "nccl" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        preset = preset_of_device(name)
        is_same = preset is None or get_topology(preset).device.name == planned.device.name
    else:
        is_same = planned.backend != "nccl"
    if not is_same:
        errors.print(
            marked(
                "note:",
                f"predicted times are of {planned.device.name}, for which the plan was made; "
                f"measured ones of this machine's {name}",
                style="bold",
            ),
            soft_wrap=True,
        )


def profile(
    plan: PlanSource,
    *,
    output: Trace = None,
    steps: Annotated[int, count(help="Number of steps; medians are shown.")] = 5,
    limit: Limit = 30,
    modules: Import = None,
    custom: CustomOperator = None,
    output_format: OutputOptions,
    connection: Connection,
) -> None:
    """Run a plan with synthetic inputs, and show predicted and measured times.

    Starts a rank per device on this machine; under `autoshard launch` or torchrun it joins them.
    """
    from autoshard import launching as launcher  # noqa: PLC0415  as above
    from autoshard.launching.command import run_module  # noqa: PLC0415  as above
    from autoshard.measure import profiling  # noqa: PLC0415  as above

    with TemporaryDirectory(prefix="autoshard-plan-") as folder:
        made = connection.read_plan(plan)
        if made.found:
            only_stage(made, "a profile")
        if "WORLD_SIZE" not in os.environ:
            launcher.check_world(made, made.mesh.num_devices)
            _say_other_devices(made.mesh.topology)
            path = Path(folder) / "plan.json"
            path.write_text(made.to_json(), encoding="utf-8")
            arguments = [f"--steps={steps}", f"--limit={limit}"]
            arguments += [f"--import={name}" for name in modules or ()]
            arguments += [f"--custom-operator={name}" for name in custom or ()]
            arguments += [] if output is None else [f"--output={output}"]
            arguments.append(f"--format={output_format.chosen}")
            num_ranks = made.mesh.num_devices
            run_module("autoshard.cli", ["profile", str(path), *arguments], num_ranks=num_ranks)
            return
        joined = launcher.join(made)
        import_modules(modules or ())
        found = profiling.profile(joined, num_steps=steps, custom_operators=custom or ())
        if joined.rank == 0:
            if output is not None:
                trace = chrome_trace(found.simulation, found.events)
                write_file(output, trace)
            print_output(profile_report(found, limit=limit), output_format.chosen)
        joined.close()
