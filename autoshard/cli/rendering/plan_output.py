"""The summary of a plan, as commands print it, and the commands that it names."""

from collections.abc import Iterator
from pathlib import Path
from shlex import join, quote

import typer
from rich.text import Text

from autoshard.cli.rendering.output import console
from autoshard.cli.rendering.wording import in_flags
from autoshard.plan import Plan
from autoshard.plan.options.restrictions import FREE
from autoshard.report import LayoutRow, answer_of
from autoshard.report.answer import WITHIN

_EXPORTS = {"fsdp2": "fsdp2", "hsdp": "fsdp2", "megatron": "megatron", "megatron-sp": "megatron"}
"""The export that has the code or settings of each family; DDP needs none."""

_NOT_REPEATED = frozenset(
    {"shape", "gpus", "devices", "axes", "max_axes", "total_time_limit", "workers"}
    | {"output", "format", "json", "quiet"}
)
"""Options that another command for the same request does not repeat: of the mesh and the output."""
_OF_ONE_LAYOUT = frozenset(
    {"stored_as", "skip_fully_replicated_on", "stages", "comparisons", "within", *FREE}
)
"""Options of `plan` that are not repeated for another layout: restrictions."""


def print_summary(
    plan: Plan,
    *,
    graph: Path | None = None,
    source: str | None = None,
    within: float = WITHIN,
    context: typer.Context | None = None,
) -> None:
    """Print the summary of a plan, wrapped on a terminal only.

    Args:
        plan: the plan, or a document without one.
        graph: file of its graph, if known.
        source: file, id or address of the plan; None if it was not written.
        within: share by which the simplest layout may be slower than the fastest.
        context: of the command that made the plan, which is repeated for the simplest layout.
    """
    width = console.width if console.is_terminal else None
    commands = _next_commands(plan, graph, source)
    # The batch of a recipe is not among the arguments.
    is_whole = context is not None and context.params.get("layout_from") is None
    if context is not None and is_whole and plan.found:
        found = answer_of(plan, within=within)
        simplest = found.layouts[found.simplest]
        commands = (*_simplest_commands(simplest, plan, context), *commands)
    text = plan.summary(width=width, commands=commands, within=within)
    console.print(Text(in_flags(text)), soft_wrap=True)


def print_next_of_search(best: Plan, context: typer.Context) -> None:
    """Print the command that plans the best mesh of a search beside the usual layouts."""
    mesh = ",".join(f"{axis.name}={axis.size}" for axis in best.mesh.axes)
    command = ["autoshard", "plan", *_repeated(context), "--mesh", mesh, "-o", "plan.json"]
    console.print(Text(f"\nNext:\n  {join(command)}"), soft_wrap=True)


def _next_commands(plan: Plan, graph: Path | None, source: str | None) -> tuple[str, ...]:
    if not plan.found:
        return ()
    if source is None:
        return ("add -o plan.json to keep the plan",)
    file = quote(source)
    commands = [f"autoshard show {file} --all"]
    commands += [] if graph is None else [f"autoshard check {quote(str(graph))} {file}"]
    return (*commands, f"autoshard launch --plan {file} train.py")


def _simplest_commands(simplest: LayoutRow, plan: Plan, context: typer.Context) -> Iterator[str]:
    """The commands that print the code or settings of a family; none for a planned layout."""
    target = _EXPORTS.get(simplest.algo or "")
    if target is None or simplest.algo is None:
        return
    mesh = ",".join(f"{name}={size}" for name, size in simplest.axes)
    file = f"{simplest.algo}.json"
    own = ["--mesh", mesh, "--algo", simplest.algo, "-o", file]
    own += ["--distributed-optimizer"] if simplest.distributed_optimizer else []
    if context.params.get("intra_bandwidth") is not None:
        # The last axis would be the node.
        own += ["--nodes", str(plan.mesh.num_nodes or 1)]
    number = simplest.micro_batches
    if number > 1 and context.params.get("micro_batches") is None:
        own += ["--micro-batches", str(number)]
    yield join(["autoshard", "plan", *_repeated(context, _OF_ONE_LAYOUT), *own])
    yield f"autoshard export {file} --to {target}"


def _repeated(context: typer.Context, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """The arguments of a command that describe its request, as they were given."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        if parameter.name in _NOT_REPEATED | left_out:
            continue
        if parameter.name == "nodes" and context.params.get("intra_bandwidth") is not None:
            continue
        value = context.params[parameter.name or ""]
        if parameter.param_type_name == "argument":
            yield str(value)
        elif isinstance(value, bool):
            yield (parameter.opts if value else parameter.secondary_opts)[0]
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from (max(parameter.opts, key=len), str(getattr(one, "value", one)))
