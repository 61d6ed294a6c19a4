"""Commands about sizes: fit and size."""

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from autoshard.cli.exit_codes import ExitCode
from autoshard.cli.models import ConfigBatch, ModelSource
from autoshard.cli.options import (
    GpusPerNode,
    Nodes,
    OutputOptions,
    Quiet,
    Topology,
    read_topology,
)
from autoshard.cli.plan_options import Planning
from autoshard.cli.progress import followed
from autoshard.cli.rendering.numbers import amount, count, duration
from autoshard.cli.rendering.output import print_output, write_stdout
from autoshard.cli.rendering.render_sizing import fit_report, largest_report, size_report
from autoshard.errors import OptionError
from autoshard.plan.predictions import Document
from autoshard.report.tables import Report
from autoshard.sizing.devices import size_model
from autoshard.sizing.fit import changed_options, fit_setup
from autoshard.sizing.largest import largest_of_setup
from autoshard.sizing.layouts import Offload, Setup
from autoshard.sizing.results import Dimension

LayoutName = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        help="Layout, as for `plan --like`: fsdp2, 'hsdp shard=8', zero1, ddp, 'megatron tp=8 sp "
        "zero1'. By default the usual ones are compared.",
    ),
]


def fit(
    model: ModelSource,
    *,
    gpus: Annotated[int, count(help="Number of devices.")],
    layout: LayoutName = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,VALUE",
            help="Compare values of an option: gpus, layout, batch-size, offload, mixed-precision, "
            "or any option of planning: reshard-after-forward=always,never. Patterns of one value "
            "are joined by +. Repeatable: then all combinations.",
        ),
    ] = None,
    largest: Annotated[
        Literal["batch-size", "seq-length"] | None,
        typer.Option(help="Find the largest batch, or the longest sequence, that fits."),
    ] = None,
    offload: Annotated[
        Offload, typer.Option(help="What is in the memory of the host instead.")
    ] = "none",
    mixed_precision: Annotated[
        str | None,
        typer.Option(
            metavar="PARAM[:REDUCE[:OUTPUT]]",
            help="Element types of computation, gradient reductions and results, with the meaning "
            "of FSDP2's MixedPrecisionPolicy: bfloat16:float32.",
        ),
    ] = None,
    wrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            help="Module that fully_shard wraps, gathered as a whole; it may be a pattern: "
            "'model.layers.*'. By default parameters are gathered as autoshard does. Repeatable.",
        ),
    ] = None,
    topology: Topology = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    batch: ConfigBatch,
    planning: Planning,
    quiet: Quiet = False,
    output_format: OutputOptions,
) -> None:
    """Show whether a model fits some devices, and what takes their memory.

    Exit status 3 says that nothing fits.
    """
    options = planning.read()
    setup = Setup(
        gpus=gpus,
        layout=layout,
        batch_size=batch.batch_size,
        seq_length=batch.seq_length,
        mixed_precision=mixed_precision or "",
        offload=offload,
        wrap=tuple(wrap or ()),
        topology=read_topology(topology),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        options=options,
        overrides=changed_options(options),
    )
    if largest is None:
        varied = dict(map(_read_varied, vary or ()))
        with followed(quiet=quiet, can_stop=False) as run:
            found = fit_setup(model, setup, varied, on_progress=run.report)
        _show(found, fit_report(found), output_format)
        fits = found.verdict == "fits"
    elif layout is None or vary:
        raise OptionError("--largest is of one configuration: give --layout, and no --vary")
    else:
        with followed(quiet=quiet, can_stop=False) as run:
            name: Dimension = "batch_size" if largest == "batch-size" else "seq_length"
            size = largest_of_setup(model, setup, name, on_progress=run.report)
        _show(size, largest_report(size), output_format)
        fits = size.size is not None
    if not fits:
        raise typer.Exit(ExitCode.NO_PLAN)


def _read_varied(text: str) -> tuple[str, Sequence[str]]:
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise OptionError(
            f"--vary {text!r} is not NAME=VALUE,VALUE, such as reshard-after-forward=always,never"
        )
    return name, values.split(",")


def size(
    model: ModelSource,
    *,
    tokens_per_second: Annotated[
        float | None, amount(help="Throughput of all devices that is needed.")
    ] = None,
    tokens: Annotated[
        float | None, amount(help="Number of tokens of the training, with --days.")
    ] = None,
    days: Annotated[
        float | None,
        duration("--days", help="Days within which that must be done.", unit="days"),
    ] = None,
    price: Annotated[
        float | None,
        amount(help="Price of a device for an hour, to find the cheapest number."),
    ] = None,
    max_gpus: Annotated[int, count(help="Largest number of devices.")] = 16_384,
    layout: LayoutName = None,
    topology: Topology = None,
    batch: ConfigBatch,
    planning: Planning,
    quiet: Quiet = False,
    output_format: OutputOptions,
) -> None:
    """Find the fewest devices that reach a throughput, and the cheapest.

    Exit status 3 says that no number of devices that was priced reaches it.
    """
    with followed(quiet=quiet, can_stop=False) as run:
        found = size_model(
            model,
            tokens_per_second=tokens_per_second,
            tokens=tokens,
            days=days,
            price=price,
            batch_size=batch.batch_size,
            seq_length=batch.seq_length,
            topology=read_topology(topology),
            layout=layout,
            max_gpus=max_gpus,
            options=planning.read(),
            on_progress=run.report,
        )
    _show(found, size_report(found), output_format)
    if found.fewest is None:
        raise typer.Exit(ExitCode.NO_PLAN)


def _show(found: Document, report: Report, output: OutputOptions) -> None:
    if output.chosen == "json":
        write_stdout(found.model_dump_json() + "\n")
    else:
        print_output(report, output.chosen)
