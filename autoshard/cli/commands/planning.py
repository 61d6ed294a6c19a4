"""Commands that plan a graph: plan, search, coverage; in this process, or at a service."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.base.files import write_file
from autoshard.base.outcome import SolveStatus
from autoshard.cli.exit_codes import ExitCode
from autoshard.cli.models import ConfigBatch, ModelSource
from autoshard.cli.options import (
    Archive,
    Connection,
    CustomOperators,
    GpusPerNode,
    Nodes,
    OutputOptions,
    PlanOutput,
    Quiet,
    Topology,
    Within,
    read_topology,
)
from autoshard.cli.plan_options import Planning
from autoshard.cli.progress import RunningRequest, followed
from autoshard.cli.rendering.numbers import count, duration
from autoshard.cli.rendering.output import (
    errors,
    marked,
    print_output,
    write_stdout,
)
from autoshard.cli.rendering.plan_output import print_next_of_search, print_summary
from autoshard.cli.rendering.render import coverage_report, search_report
from autoshard.cli.rendering.render_plan import plan_report
from autoshard.cli.rendering.tables import print_report
from autoshard.client import JobProgress, PlanResult
from autoshard.errors import OptionError
from autoshard.exports import (
    Recipe,
    layout_of,
    program_batch,
    program_facts,
    read_recipe,
    recipe_problems,
)
from autoshard.graph import Graph, is_graph_file, load_graph
from autoshard.mesh import Axis, Mesh, make_mesh, mesh_text
from autoshard.model_plans import divided_step, divides_step
from autoshard.plan import Plan, PlanOptions
from autoshard.report.answer import WITHIN
from autoshard.requests.models import (
    MeshSearchRequest,
    OperatorCoverageRequest,
    PlanRequest,
    SearchArguments,
    read_model,
)
from autoshard.requests.results import MeshSearch
from autoshard.requests.running import plan_coverage
from autoshard.requests.this_process import ThisProcess

if TYPE_CHECKING:
    from autoshard.requests.steps import DividedStep

_SHOWN = 5
"""Meshes that are listed when --gpus chooses one."""

_SOURCES = {
    "service": "made by the service",
    "offline": "the service does not answer; this plan was kept on this machine",
    "local": "made in this process",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Options about the mesh of a plan."""

    shape: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            help="Size of each axis, outermost first, such as 2x4, or dp=2,tp=4 with names.",
        ),
    ] = None
    gpus: Annotated[
        int | None,
        count(help="Number of devices, in place of --mesh: plan on the best mesh of `search`."),
    ] = None
    axes: Annotated[str | None, typer.Option(help="Name of each axis, such as dp,tp.")] = None
    topology: Topology = None
    nodes: Nodes = None
    gpus_per_node: GpusPerNode = None
    intra_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth per device within a node, the last axis, such as 450GB/s."),
    ] = None
    inter_bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth per device between nodes, the earlier axes: 50GB/s."),
    ] = None

    def mesh(self) -> Mesh | None:
        """The mesh, or None if the number of devices is given instead.

        Raises:
            OptionError: both are given, or none, or an option is for a mesh only.
            MeshError: there is no such mesh.
        """
        if (self.shape is None) == (self.gpus is None):
            raise OptionError("give one of --mesh and --gpus; with --gpus 8 the mesh is chosen")
        if self.shape is not None:
            return self._made(self.shape)
        for name in ("axes", "intra_bandwidth", "inter_bandwidth"):
            if getattr(self, name) is not None:
                raise OptionError(f"--{name.replace('_', '-')} is for a --mesh, not for --gpus")
        return None

    def as_one_axis(self) -> Mesh:
        """The mesh, or one of all devices in one axis, which a layout then divides."""
        return self.mesh() or self._made(str(self.gpus))

    def search_arguments(self, options: PlanOptions, *, discover: bool) -> SearchArguments:
        """The search that chooses the mesh."""
        assert self.gpus is not None, "a mesh is given otherwise"
        return SearchArguments(
            num_devices=self.gpus,
            topology=read_topology(self.topology),
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            options=options.with_values(comparisons=False),
            total_time_limit=options.solver.time_limit / 2,
            discover=discover,
        )

    def _made(self, shape: str) -> Mesh:
        return make_mesh(
            shape,
            axes=None if self.axes is None else self.axes.split(","),
            topology=read_topology(self.topology),
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            intra_bandwidth=self.intra_bandwidth,
            inter_bandwidth=self.inter_bandwidth,
        )


def plan(
    context: typer.Context,
    model: ModelSource,
    *,
    devices: Devices,
    layout_from: Annotated[
        str | None,
        typer.Option(
            "--layout-from",
            "--like",
            metavar="FILE|LAYOUT",
            help="Recipe of another framework, on as many devices as --mesh says: torchtitan's "
            "TOML, a file of accelerate, DeepSpeed or Megatron-Bridge, a tp_plan, FILE.py:FUNCTION "
            "of torchtitan or Megatron-Bridge, a command line of Megatron-LM in quotes or a script "
            "with it; or ddp, zero1, fsdp2, 'hsdp shard=8', 'megatron tp=8 pp=4 vpp=2 cp=2 ep=8 sp "
            "zero1'. Says what cannot work, what it costs beside the fastest plan, and which one "
            "change helps most.",
        ),
    ] = None,
    batch: ConfigBatch,
    planning: Planning,
    comparisons: Annotated[
        bool,
        typer.Option(
            "--comparisons/--no-comparisons",
            help="Also plan DDP, FSDP2, HSDP and Megatron on the same devices, and what "
            "restrictions cost, within half of the time limit.",
        ),
    ] = True,
    within: Within = WITHIN,
    custom: CustomOperators,
    connection: Connection,
    output: PlanOutput = None,
    quiet: Quiet = False,
    output_format: OutputOptions,
) -> None:
    """Plan a model on a mesh or a number of devices, and show or write the plan.

    The error bar of a predicted time, such as 416 ms +- 9 %, holds for 80 % of the published runs
    that were predicted in a layout of this kind on this generation of GPUs.
    """
    options = planning.read().with_values(comparisons=comparisons)
    discover = custom.discover()
    recipe = program = step = None
    if layout_from is None:
        mesh, pipelines = devices.mesh(), not connection.server
        step = _step(model, batch, options, devices, pipelines=pipelines, quiet=quiet)
        if step is None:
            graph = _graph(model, batch, options, quiet=quiet)
        else:
            graph, options, mesh = step.graph, step.options, step.mesh
    else:
        size = None if is_graph_file(model) else batch.batch_size
        recipe = _Recipe.read(layout_from, devices.as_one_axis(), options, size)
        mode = PlanOptions(mode=options.mode)
        graph = _graph(model, recipe.batch(model, batch), mode, quiet=quiet)
        program = load_graph(graph)
        mesh, options = recipe.laid_out(program)
    request = _PlanningRequest(
        graph, mesh, options, devices, connection, discover=discover, quiet=quiet
    )
    result = request.planned(None if step is None else step.one_stage)
    found = result.plan
    assert found is not None, "the request waits for the plan"
    if connection.server:
        errors.print(marked("plan:", _source(result), style="bold"), highlight=False)
    _write(found, output)
    if output_format.chosen == "json":
        write_stdout(found.to_json() + "\n")
    elif output_format.chosen == "csv" and found.found:
        print_output(plan_report(found), "csv")
    else:
        file = graph if isinstance(graph, Path) else None
        source = None if output is None else str(output)
        print_summary(found, graph=file, source=source, within=within, context=context)
    if recipe is not None and program is not None and comparisons:
        recipe.print_changes(found, program, quiet=quiet)
    _end(found, is_stopped=found.certificate.status is SolveStatus.CANCELLED)


@dataclass(frozen=True)
class _PlanningRequest:
    """A request for a plan, in this process or at a service.

    Attributes:
        graph: the program.
        mesh: the devices; None to search the mesh.
        options: of planning.
        devices: options about the mesh.
        connection: to a service.
        discover: True to look for rules of the model's own operators.
        quiet: True to print no progress.
    """

    graph: Path | bytes
    mesh: Mesh | None
    options: PlanOptions
    devices: Devices
    connection: Connection
    discover: bool
    quiet: bool

    def planned(self, one_stage: tuple[bytes, PlanOptions] | None) -> PlanResult:
        """The plan.

        Args:
            one_stage: of a pipeline whose mesh was chosen, what it is compared with, and what is
                planned if the pipeline has no plan; else None.
        """
        if self.connection.server:
            return self._at_service()
        # One for both: the plan of the mesh that the search chooses is not made again.
        here = self.connection.here()
        mesh = self.mesh or self._best_mesh(here)
        with _followed(self.connection, quiet=self.quiet) as run:
            request = PlanRequest(
                self.graph,
                mesh=mesh,
                options=self.options,
                discover=self.discover,
                one_stage=one_stage,
            )
            result = here.plan(request, on_progress=run.report, cancel=run.stop)
            is_stopped = run.stop.is_set()
        if one_stage is None or is_stopped or (result.plan is not None and result.plan.found):
            return result
        text = "it has no plan in the time limit; one stage is planned"
        errors.print(marked("pipeline:", text, style="bold"), highlight=False)
        graph, options = one_stage
        return replace(self, graph=graph, mesh=None, options=options).planned(None)

    def _at_service(self) -> PlanResult:
        mesh = self.mesh or self._best_mesh(None)
        with (
            _followed(self.connection, quiet=self.quiet) as run,
            self.connection.open() as client,
        ):
            return client.request_plan(
                self.graph,
                mesh=mesh,
                options=self.options,
                discover=self.discover,
                on_progress=run.report,
            )

    def _best_mesh(self, here: ThisProcess | None) -> Mesh:
        arguments = self.devices.search_arguments(self.options, discover=self.discover)
        return _best_mesh(self.graph, arguments, self.connection, here, quiet=self.quiet)


def _graph(model: str, batch: ConfigBatch, options: PlanOptions, *, quiet: bool) -> Path | bytes:
    """The file of a graph, or the graph of a model that is exported here, with progress."""
    with followed(quiet=quiet, can_stop=False) as run:
        run.report(JobProgress(phase="exporting the model", elapsed=0.0))
        return batch.graph(model, options)


def _step(
    model: str,
    batch: ConfigBatch,
    options: PlanOptions,
    devices: Devices,
    *,
    pipelines: bool,
    quiet: bool,
) -> "DividedStep | None":
    """The step of a config, if its micro-batches are chosen, else None."""
    if devices.gpus is None or not divides_step(model, options):
        return None
    with followed(quiet=quiet, can_stop=True) as run:
        step = divided_step(
            *(model, options, devices.gpus),
            **asdict(batch),
            topology=read_topology(devices.topology),
            nodes=devices.nodes,
            gpus_per_node=devices.gpus_per_node,
            pipelines=pipelines,
            on_progress=run.report,
            cancel=run.stop,
        )
    if not quiet:
        number = step.options.training.micro_batches
        text = f"{number} of a step (--micro-batches gives another number)"
        errors.print(marked("micro-batches:", text, style="bold"), highlight=False)
        if step.mesh is not None:
            text = f"{mesh_text(step.mesh)}, estimated to be faster than one stage (--stages 1)"
            errors.print(marked("pipeline:", text, style="bold"), highlight=False)
    return step


def _best_mesh(
    graph: Path | bytes,
    arguments: SearchArguments,
    connection: Connection,
    here: ThisProcess | None,
    *,
    quiet: bool,
) -> Mesh:
    """The mesh of the fastest plan of a search; those of the next best are listed on stderr."""
    found, plans, _ = _searched(graph, arguments, connection, here, quiet=quiet)
    certificates = [one.certificate for one in found.meshes[:1]]
    has_plan = any(one is not None and one.objective is not None for one in certificates)
    if not (quiet and has_plan):
        shown = found.model_copy(update={"meshes": found.meshes[:_SHOWN]})
        print_report(search_report(shown, plans[:_SHOWN]), errors)
    if not has_plan:
        raise typer.Exit(ExitCode.NO_PLAN)
    return found.meshes[0].mesh


def _searched(
    graph: Path | bytes,
    arguments: SearchArguments,
    connection: Connection,
    here: ThisProcess | None,
    *,
    quiet: bool,
) -> tuple[MeshSearch, Sequence[Plan | None], bool]:
    """The meshes of a search, their plans, and whether Ctrl-C has ended it."""
    with _followed(connection, quiet=quiet) as run:
        if here is None:
            with connection.open() as client:
                found = client.search(graph, on_progress=run.report, **arguments)
                plans = _plans_of(found, client.get_plan)
        else:
            request = MeshSearchRequest(graph, **arguments)
            found = here.search(request, on_progress=run.report, cancel=run.stop)
            plans = _plans_of(found, here.get_plan)
    return found, plans, run.stop.is_set()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A recipe of another framework, and what it is for.

    Attributes:
        recipe: the recipe.
        devices: the devices; their axes are not used.
        options: of the request, without those of the recipe.
    """

    recipe: Recipe
    devices: Mesh
    options: PlanOptions

    @classmethod
    def read(
        cls, source: str, devices: Mesh, options: PlanOptions, batch_size: int | None
    ) -> "_Recipe":
        """Read a recipe, with the batch of a step in place of its own if one is given.

        What is wrong with it on any model is an error.
        """
        recipe = read_recipe(source)
        if batch_size is not None:
            recipe = replace(recipe, global_batch=batch_size)
        if recipe.problems:
            raise OptionError(_refused(recipe, recipe.problems))
        return cls(recipe, devices, options)

    def batch(self, model: str, given: ConfigBatch) -> ConfigBatch:
        """The batch of a config: that of the recipe where the command line has none."""
        recipe, num_ranks = self.recipe, self.devices.num_devices
        if is_graph_file(model) or ".py:" in model:
            return given
        size = given.batch_size
        if num_ranks % recipe.on(num_ranks).model_ranks == 0:
            size = program_batch(recipe, num_ranks) or size
        return replace(given, batch_size=size, seq_length=given.seq_length or recipe.seq_length)

    def laid_out(self, graph: Graph) -> tuple[Mesh, PlanOptions]:
        """The mesh and options of the recipe, with the other options given.

        Raises:
            OptionError: the recipe cannot run.
        """
        facts, num_ranks = program_facts(graph), self.devices.num_devices
        problems = recipe_problems(self.recipe, num_ranks, self.devices.topology, facts)
        if problems:
            raise OptionError(_refused(self.recipe, problems))
        found = layout_of(self.recipe, num_ranks, facts)
        for text in found.chosen:
            line = marked(f"{self.recipe.framework}:", text, style="bold")
            errors.print(line, highlight=False, soft_wrap=True)
        axes = tuple(Axis(name, size) for name, size in found.axes)
        mesh = Mesh(axes, self.devices.topology)
        return mesh, self.options.with_values(**found.options.given)

    def print_changes(self, plan: Plan, graph: Graph, *, quiet: bool) -> None:
        """Print the one change of the recipe that helps most, to stderr, after its plan."""
        # The planner is loaded only where it plans.
        from autoshard.requests.recipe_changes import (  # noqa: PLC0415
            change_sentence,
            recipe_changes,
        )

        with followed(quiet=quiet, can_stop=False) as run:
            run.report(JobProgress(phase="changing one setting of the recipe", elapsed=0.0))
            seconds = self.options.solver.time_limit / 2
            found = recipe_changes(self.recipe, graph, self.devices, self.options, seconds)
        errors.print(change_sentence(plan, found), highlight=False, soft_wrap=True)


def _refused(recipe: Recipe, problems: Sequence[str]) -> str:
    return f"the recipe of {recipe.framework} cannot run: {'; '.join(problems)}"


def search(
    context: typer.Context,
    model: ModelSource,
    *,
    devices: Annotated[int, count(help="Number of devices of the mesh.")],
    topology: Topology = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = None,
    max_axes: Annotated[int, count(help="Largest number of mesh axes.")] = 3,
    total_time_limit: Annotated[
        float | None,
        duration(
            help="Time limit of all meshes together, which have what is known of them then; "
            "--time-limit is that of each mesh.",
            unit="seconds",
        ),
    ] = None,
    workers: Annotated[
        int, count(help="Number of meshes planned at the same time, without a service.")
    ] = 2,
    batch: ConfigBatch,
    planning: Planning,
    custom: CustomOperators,
    connection: Connection,
    output: PlanOutput = None,
    quiet: Quiet = False,
    output_format: OutputOptions,
) -> None:
    """Plan a graph on every mesh of a number of devices, and rank the meshes.

    The column error says how much more or less 80 % of comparable published runs took.
    """
    options = planning.read()
    arguments = SearchArguments(
        num_devices=devices,
        topology=read_topology(topology),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        max_axes=max_axes,
        total_time_limit=total_time_limit,
        options=options,
        discover=custom.discover(),
    )
    graph = _graph(model, batch, options, quiet=quiet)
    here = None if connection.server else connection.here(num_workers=workers)
    found, plans, is_stopped = _searched(graph, arguments, connection, here, quiet=quiet)
    best = plans[0] if plans else None
    if best is not None:
        _write(best, output)
    print_output(search_report(found, plans), output_format.chosen)
    if best is not None and best.found and output_format.chosen == "table":
        print_next_of_search(best, context)
    _end(best, is_stopped=is_stopped)


def _plans_of(found: MeshSearch, get_plan: Callable[[str], Plan | None]) -> Sequence[Plan | None]:
    """The plans of the meshes of a search, best first; None for a mesh without one."""
    ids = (mesh.plan_id for mesh in found.meshes)
    return [None if known is None else get_plan(known) for known in ids]


def coverage(
    graph: Archive,
    plan: Annotated[
        str | None,
        typer.Argument(help="A plan of the graph, for the time of each operator on its mesh."),
    ] = None,
    *,
    custom: CustomOperators,
    connection: Connection,
    output_format: OutputOptions,
) -> None:
    """List the operators of a graph, those that cannot be sharded and why, and their cost.

    With a plan, the costs are worked out in this process.
    """
    made, discover = None if plan is None else connection.read_plan(plan), custom.discover()
    if made is not None:
        found = plan_coverage(read_model(graph), made)
    elif connection.server:
        with connection.open() as client:
            found = client.coverage(graph, discover=discover)
    else:
        found = connection.here().coverage(OperatorCoverageRequest(graph, discover=discover))
    if output_format.chosen == "json":
        write_stdout(found.model_dump_json() + "\n")
    else:
        print_output(coverage_report(found), output_format.chosen)


def _followed(connection: Connection, *, quiet: bool) -> AbstractContextManager[RunningRequest]:
    """Follow a request; at a service, whose jobs others may wait for, Ctrl-C does not stop it."""
    return followed(quiet=quiet, can_stop=not connection.server)


def _end(best: Plan | None, *, is_stopped: bool) -> None:
    """End the command with the status of its plan."""
    if best is None or not best.found:
        raise typer.Exit(ExitCode.NO_PLAN)
    if is_stopped:
        errors.print("stopped by Ctrl-C: this is the best plan so far")
        raise typer.Exit(ExitCode.STOPPED)


def _source(result: PlanResult) -> str:
    if result.source == "service" and result.cached:
        return "already known to the service"
    return _SOURCES[result.source]


def _write(plan: Plan, path: Path | None) -> None:
    if path is not None:
        write_file(path, plan.to_json(indent=1))
