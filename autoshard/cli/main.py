"""The `autoshard` command and the table of its subcommands."""

from typing import Annotated

import typer

from autoshard.cli.lazy import Deferred, LazyGroup

PLANNING, PLANS, RUNNING, SERVICE = "Make plans", "Read plans", "Run plans", "Service and cache"

_TORCHRUN = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Settings of a command whose arguments are parsed by torchrun."""

_FIRST_OPTIONS = (
    *("--topology", "--mode", "--optimizer", "--memory-budget", "--micro-batches"),
    *("--stages", "--time-limit", "--batch-size", "--seq-length"),
)
"""Options of planning that help shows first."""

COMMANDS = {
    "plan": Deferred(
        "autoshard.cli.commands.planning:plan",
        "Plan a model on a mesh or a number of devices, and show or write the plan.",
        PLANNING,
        first_options=("--mesh", "--gpus", "--output", "--layout-from", *_FIRST_OPTIONS),
    ),
    "search": Deferred(
        "autoshard.cli.commands.planning:search",
        "Plan a graph on every mesh of a number of devices, and rank the meshes.",
        PLANNING,
        first_options=("--devices", "--output", *_FIRST_OPTIONS),
    ),
    "fit": Deferred(
        "autoshard.cli.commands.sizing:fit",
        "Show whether a model fits some devices, and what takes their memory.",
        PLANNING,
        first_options=(
            "--gpus",
            "--layout",
            "--vary",
            "--largest",
            "--offload",
            "--wrap",
            *_FIRST_OPTIONS,
        ),
    ),
    "size": Deferred(
        "autoshard.cli.commands.sizing:size",
        "Find the fewest devices that reach a throughput, and the cheapest.",
        PLANNING,
        first_options=(
            *("--tokens-per-second", "--tokens", "--days", "--price", "--layout", "--max-gpus"),
            *_FIRST_OPTIONS,
        ),
    ),
    "coverage": Deferred(
        "autoshard.cli.commands.planning:coverage",
        "List the operators of a graph, those that cannot be sharded and why, and their cost.",
        PLANNING,
    ),
    "topologies": Deferred(
        "autoshard.cli.commands.topologies:topologies",
        "List the clusters that --topology can name, with their devices and links.",
        PLANNING,
    ),
    "show": Deferred(
        "autoshard.cli.commands.plans:show",
        "Show the summary of a plan, its tables, or a page to look into.",
        PLANS,
    ),
    "check": Deferred(
        "autoshard.cli.commands.plans:check",
        "Check a plan against its graph: every layout valid, the predicted cost correct.",
        PLANS,
    ),
    "explain": Deferred(
        "autoshard.cli.commands.plans:explain",
        "Show every alternative of one choice of a plan, with its cost.",
        PLANS,
    ),
    "compare": Deferred(
        "autoshard.cli.commands.plans:compare",
        "Show the differences between two plans of one graph.",
        PLANS,
    ),
    "export": Deferred(
        "autoshard.cli.commands.plans:export",
        "Export a plan as code or settings of another framework.",
        PLANS,
    ),
    "mase": Deferred(
        "autoshard.cli.commands.plans:mase",
        "Read and write the ilp_solution.pkl of MASE's auto-sharding.",
        PLANS,
    ),
    "simulate": Deferred(
        "autoshard.cli.commands.runs:simulate",
        "Show one step of a plan over time: compute, communication and memory; a pipeline by rank.",
        RUNNING,
    ),
    "launch": Deferred(
        "autoshard.cli.commands.runs:launch",
        r"Run a program on the devices of a plan: --plan plan.json \[torchrun's options] PROGRAM.",
        RUNNING,
        _TORCHRUN,
    ),
    "calibrate": Deferred(
        "autoshard.cli.commands.runs:calibrate",
        "Measure links and devices on the ranks, and write a topology for --topology.",
        RUNNING,
    ),
    "profile": Deferred(
        "autoshard.cli.commands.runs:profile",
        "Run a plan with synthetic inputs, and show predicted and measured times.",
        RUNNING,
    ),
    "demo": Deferred(
        "autoshard.cli.commands.service:demo",
        "Plan GPT-2 through the service, then run a small one sharded on 4 ranks.",
        RUNNING,
    ),
    "serve": Deferred(
        "autoshard.cli.commands.service:serve", "Start the planning service.", SERVICE
    ),
    "worker": Deferred(
        "autoshard.cli.commands.service:worker",
        "Run jobs of a service on this host too; after SIGTERM, running jobs may finish in time.",
        SERVICE,
    ),
    "cache": Deferred(
        "autoshard.cli.commands.stores:cache",
        "Inspect and manage the cache of plans and solved blocks: the folder of `autoshard plan`, "
        "or the database of a service (--store).",
        SERVICE,
    ),
    "keys": Deferred(
        "autoshard.cli.commands.stores:keys",
        "Make, list and revoke the API keys of a service, in its database.",
        SERVICE,
    ),
}
"""The subcommands, in the order of the help."""


class _Commands(LazyGroup):
    deferred = COMMANDS


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Plan how a PyTorch model is sharded over a device mesh.",
    epilog="Exit status: 0 success, 1 error, 2 the command line cannot be read, 3 there is no "
    "plan, 4 Ctrl-C ended planning with the best plan so far, 130 Ctrl-C ended the command.",
)


def main() -> None:
    """Entry point of the `autoshard` command."""
    app(prog_name="autoshard")


def _version(*, value: bool) -> None:
    if value:
        from autoshard.version import __version__  # noqa: PLC0415  reads the installed packages

        typer.echo(f"autoshard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
