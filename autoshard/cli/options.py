"""What several commands of the command line take."""

from pathlib import Path
from typing import Annotated

import typer

Archive = Annotated[Path, typer.Argument(help="A .pt2 archive, or its model.json.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan as `autoshard plan -o` wrote it.")]
Topology = Annotated[
    str | None, typer.Option(help="A preset by name, or a .json file of `autoshard calibrate`.")
]
Mode = Annotated[str, typer.Option("--mode", help="training or inference.")]
Optimizer = Annotated[str, typer.Option(help="Whose state is kept in training.")]
Memory = Annotated[
    str | None, typer.Option(help="Budget per device, such as 80GB; default: all it has.")
]
MasterWeights = Annotated[
    bool,
    typer.Option("--master-weights", help="The optimizer keeps a float32 copy of parameters."),
]
StateDType = Annotated[
    str | None,
    typer.Option("--state-dtype", help="Of the optimizer's state: float32, float16 or bfloat16."),
]
Regather = Annotated[
    str,
    typer.Option(
        help="Whether backward converts tensors again instead of holding them, such as gathered "
        "parameters: auto, never or always."
    ),
]
Checkpointing = Annotated[
    str,
    typer.Option(
        help="Whether repeated blocks run again in backward to hold less: auto, never or always."
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap",
        help="Gathers of parameters and reductions of their gradients run beside compute; only "
        "what does not fit is priced.",
    ),
]
TimeLimit = Annotated[float, typer.Option(help="Seconds for the solver, per plan.")]
Algo = Annotated[str, typer.Option(help="optimal, or megatron: that fixed pattern, as a baseline.")]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        help="KIND:NAME=LAYOUT with KIND input, output, parameter or node; NAME may be a "
        "pattern: 'parameter:*.wte.weight=*,S(0)'. May be repeated.",
    ),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option("--forbid", help="COLLECTIVE or COLLECTIVE@AXIS: all_to_all@tp. Repeatable."),
]
BatchAxis = Annotated[
    str | None, typer.Option(help="The axis that cuts the batch dim; no other axis does.")
]
SkipReplicated = Annotated[
    bool,
    typer.Option(
        "--skip-fully-replicated",
        help="No operator that can be cut does all of its work on every rank.",
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="AUTOSHARD_CACHE",
        help="Folder of solved blocks and found rules, which other plans reuse; default: in your "
        "cache folder.",
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Solve everything anew, and keep nothing.")
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="A Python module that registers operators of the model's own. Repeatable.",
    ),
]
CustomOperator = Annotated[
    list[str] | None,
    typer.Option(
        "--custom-operator",
        help="An operator, namespace::name, or a namespace, that the plan may call though it is "
        "not of ATen. Repeatable.",
    ),
]
NoDiscover = Annotated[
    bool,
    typer.Option(
        "--no-discover",
        help="Do not run operators without a rule on small tensors to find out how they may be "
        "cut: they run whole.",
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="AUTOSHARD_SERVER",
        help="Address of a planning service that does the work, such as http://planner:8000; "
        "without it, it is done here.",
    ),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the plan.")]
