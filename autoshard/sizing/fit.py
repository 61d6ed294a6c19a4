"""`fit_model`: whether a model fits some devices, and what takes their memory."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from autoshard.base.arguments import Count, check_arguments
from autoshard.base.integers import MAX_BYTES
from autoshard.base.quantities import format_bytes
from autoshard.errors import InputError, OptionError
from autoshard.graph import Graph, GraphLike
from autoshard.lowering.timeline import KINDS
from autoshard.mesh import Mesh, Topology, mesh_text, resolve_topology
from autoshard.plan.document import GraphSummary, Plan
from autoshard.plan.options import PlanOptions, to_options
from autoshard.planner.baselines import ComparisonLimits
from autoshard.planner.memory.least_memory import LeastMemory
from autoshard.planner.pipeline.pipeline_planner import make_first_plan
from autoshard.requests.running import ProgressListener, Resources
from autoshard.requests.running import plan as run_plan
from autoshard.sizing.held import held_memory, host_bytes
from autoshard.sizing.layouts import Offload, Setup
from autoshard.sizing.models import ResizableModel
from autoshard.sizing.results import Fit, FitRow

_UNLIMITED = MAX_BYTES // 2
"""A memory budget that no plan exceeds."""
_AUTO = ("activation_checkpointing", "reshard_after_forward")
"""Options that trade time for memory where that is needed to fit."""


@check_arguments
def fit_model(
    model: GraphLike,
    gpus: Count,
    *,
    topology: str | Topology | None = None,
    nodes: Count | None = None,
    gpus_per_node: Count | None = None,
    layout: str | None = None,
    batch_size: Count | None = None,
    seq_length: Count | None = None,
    mixed_precision: str | None = None,
    offload: Offload = "none",
    wrap: Collection[str] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    options: PlanOptions | None = None,
    on_progress: ProgressListener | None = None,
    **single_options: Any,
) -> Fit:
    """Check that a model fits some devices, by layout, and account for their memory.

    A layout that is named is priced: its memory is that of the fastest plan of its pattern, as
    `autoshard plan --like LAYOUT` predicts it. If it does not fit, the figures are those with every
    block recomputed and every parameter resharded after forward, unless the options rule that out.

    Args:
        model: a graph, as for `make_plan`; the `config.json` of a model of transformers, its folder
            or its name in the local cache; or `FILE.py:FUNCTION`, which is run.
        gpus: number of devices.
        topology: name of a preset, or a topology; the default one if None.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        layout: such as `fsdp2`, `hsdp shard=8`, `ddp`, or `megatron tp=8 sp zero1`; see
            `read_like`. If None, a row for each of the usual ones.
        batch_size: samples of a step, of all devices together; that of the graph if None.
        seq_length: tokens of each sample; that of the graph if None.
        mixed_precision: element types `PARAM`, `PARAM:REDUCE` or `PARAM:REDUCE:OUTPUT`, with the
            meaning of FSDP2's policy; of a model that is exported here.
        offload: `optimizer` if the optimizer's state is in the memory of the host: then the step
            time has neither the update nor the transfers.
        wrap: modules that `fully_shard` wraps, which are then gathered as a whole: dotted paths, or
            patterns in which `*` matches any text; of `fsdp2` and `hsdp`. If empty, parameters are
            gathered as autoshard does.
        vary: values of one or several of these arguments or of options of planning, by name: a row
            for each combination.
        options: of planning.
        on_progress: called with the progress of each row.
        **single_options: single members of `PlanOptions`, which replace those of `options`.

    Raises:
        GraphError: the model cannot be exported or planned.
        MeshError: there are no such devices.
        OptionError: an argument or option is invalid, or the model has no such size.

    Example:
        >>> found = fit_model("llama/config.json", 8, topology="h100-sxm", layout="fsdp2")
        >>> print(found.rows[0].verdict, found.rows[0].peak)
        >>> found = fit_model("model.pt2", 64, layout="fsdp2", vary={"gpus": [8, 16, 32]})
    """
    asked = to_options(options, single_options)
    setup = Setup(
        gpus=gpus,
        layout=layout,
        batch_size=batch_size,
        seq_length=seq_length,
        mixed_precision=mixed_precision or "",
        offload=offload,
        wrap=tuple(wrap),
        topology=topology,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        options=asked,
        overrides=changed_options(asked),
    )
    return fit_setup(model, setup, vary or {}, on_progress=on_progress)


def fit_setup(
    model: GraphLike,
    setup: Setup,
    vary: Mapping[str, Sequence[Any]],
    *,
    on_progress: ProgressListener | None = None,
) -> Fit:
    """Fit a model whose graph can be made at several sizes; the work of `fit_model`.

    Args:
        model: as for `fit_model`.
        setup: the configuration; without a layout, there is a row for each of the usual ones.
        vary: as for `fit_model`.
        on_progress: as for `fit_model`.
    """
    varied = dict(vary)
    if setup.layout is None and "layout" not in varied:
        varied["layout"] = usual_layouts(setup)
    cases = list(_cases(setup, varied))
    several = len({case.batch_size for _, case in cases}) > 1
    resizable = ResizableModel(model, setup.options.mode)
    sizing = Sizing(resizable, on_progress, any_batch_size=several)
    least = sizing.least(cases[0][1])
    rows = tuple(sizing.row(case, named) for named, case in cases)
    return sizing.fit(cases[0][1], least, rows)


def usual_layouts(setup: Setup) -> tuple[str, ...]:
    """The layouts that are compared if none is named, by what a device stores of the parameters."""
    topology = resolve_topology(setup.topology, setup.gpus, setup.nodes, setup.gpus_per_node)
    node = min(topology.devices_per_node or setup.gpus, setup.gpus)
    if setup.gpus == 1:
        return ("ddp",)
    hybrid = (f"hsdp shard={node}",) if 1 < node < setup.gpus else ()
    tensor = (f"megatron tp={node} sp zero1",) if setup.gpus % node == 0 and node > 1 else ()
    return ("fsdp2", *hybrid, *tensor, "zero1", "ddp")


class Sizing:
    """Prices configurations of one model.

    Args:
        model: the model.
        on_progress: called with the progress of each plan.
        any_batch_size: True if graphs of several batch sizes will be asked for.
    """

    def __init__(
        self,
        model: ResizableModel,
        on_progress: ProgressListener | None = None,
        *,
        any_batch_size: bool = False,
    ) -> None:
        self.any_batch_size = any_batch_size
        self._model = model
        self._on_progress = on_progress
        self._resources = Resources()

    def graph(self, setup: Setup) -> Graph:
        """The graph of a configuration."""
        return self._model.graph(setup.sizes, any_batch_size=self.any_batch_size)

    def least(self, setup: Setup) -> LeastMemory:
        """The memory that no layout goes below, by arithmetic."""
        mesh, options = setup.placed()
        return LeastMemory.of(self.graph(setup), mesh, options)

    def plan(self, setup: Setup, **values: Any) -> Plan:
        """The fastest plan of a configuration, with other values of some options."""
        mesh, options = setup.placed()
        made, _ = run_plan(
            self.graph(setup),
            mesh,
            options.with_values(**values),
            self._resources,
            on_progress=self._on_progress,
        )
        return made

    def priced(self, setup: Setup) -> tuple[Plan, bool]:
        """The plan of a configuration, and whether it fits.

        If none fits, the plan is that of `smallest`.
        """
        budget = budget_of(*setup.placed())
        # Without a limit, nothing is recomputed that need not be: if that fits, it is the plan.
        free = self.plan(setup, memory_budget=_UNLIMITED)
        if _fits(free, budget):
            return free, True
        smallest = self.smallest(setup)
        if _fits(smallest, budget):
            made = self.plan(setup)
            return (made if made.found else smallest), True
        # Other layouts of the pattern may need less than the fastest ones.
        mesh, options = setup.placed()
        first = make_first_plan(self.graph(setup), mesh, options, ComparisonLimits())
        return (first, True) if first.found else (smallest, False)

    def smallest(self, setup: Setup) -> Plan:
        """The plan with everything recomputed and resharded that the options allow to be.

        Its devices have as much memory as it needs.
        """
        _, options = setup.placed()
        always = {name: "always" for name in _AUTO if options.value(name) == "auto"}
        try:
            return self.plan(setup, memory_budget=_UNLIMITED, **always)
        except OptionError:
            # There is no block that could be recomputed.
            always.pop("activation_checkpointing", None)
            return self.plan(setup, memory_budget=_UNLIMITED, **always)

    def row(self, setup: Setup, varied: Mapping[str, str]) -> FitRow:
        """The row of one configuration."""
        try:
            mesh, options = setup.placed()
            made, fits = self.priced(setup)
        except InputError as error:
            return without_plan(setup, varied, str(error))
        if not made.found or made.memory is None:
            return without_plan(setup, varied, made.reason)
        memory, held = made.memory, None
        peak, kinds = memory.peak, {kind: getattr(memory, kind) for kind in KINDS}
        if made.pipeline is None:
            reshards = options.memory.reshard_after_forward != "never"
            try:
                held, kinds = held_memory(made, setup.wrap, reshards=reshards)
            except OptionError as error:
                return without_plan(setup, varied, str(error))
            peak = sum(kinds.values())
        fits = fits and peak <= budget_of(mesh, options)
        needs = f"needs {format_bytes(peak)} of {format_bytes(budget_of(mesh, options))}"
        return FitRow(
            varied=dict(varied),
            layout=setup.layout or "",
            mesh=mesh_text(mesh),
            verdict="fits" if fits else "does not fit",
            peak=peak,
            kinds=kinds,
            held=held,
            step_time=made.costs.total if fits and made.costs is not None else None,
            host_memory=host_bytes(made, setup.options) if setup.offload == "optimizer" else None,
            num_recomputed=sum(len(stage.checkpoints) for stage in made.stages),
            remark="" if fits else f"{needs}{_settings(made)}",
        )

    def fit(self, setup: Setup, least: LeastMemory, rows: tuple[FitRow, ...]) -> Fit:
        """The document of some rows."""
        graph = self.graph(setup)
        mesh, options = setup.placed()
        summary = GraphSummary.of(graph)
        return Fit(
            model=graph.model.name if graph.model is not None and graph.model.name else "Model",
            num_parameters=summary.num_parameters,
            hardware=mesh.description,
            precision=summary.precision,
            mode=options.mode,
            budget=least.budget,
            least=least.least_per_device,
            least_statement=least.statement,
            rows=rows,
        )


def _cases(
    setup: Setup, varied: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[dict[str, str], Setup]]:
    """Each combination of the values, in words, with its configuration."""
    for values in product(*varied.values()):
        found = setup
        for name, value in zip(varied, values, strict=True):
            found = found.with_setting(name, value)
        yield {n: _shown(v) for n, v in zip(varied, values, strict=True)}, found


def _shown(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "+".join(map(str, value)) or "none"
    return str(value)


def _fits(made: Plan, budget: int) -> bool:
    return made.memory is not None and made.memory.peak <= budget


def changed_options(options: PlanOptions) -> frozenset[str]:
    """The options that do not have their defaults."""
    default = PlanOptions()
    return frozenset(
        name for name in PlanOptions.keywords() if options.value(name) != default.value(name)
    )


def budget_of(mesh: Mesh, options: PlanOptions) -> int:
    """Bytes of a device that may be used."""
    return options.memory.budget or mesh.topology.device.memory


def _settings(made: Plan) -> str:
    """Measures that a plan which does not fit has already taken, in words."""
    number = sum(len(stage.checkpoints) for stage in made.stages)
    return f", although {number} modules are recomputed" if number else ""


def without_plan(setup: Setup, varied: Mapping[str, str], reason: str) -> FitRow:
    """The row of a configuration without a plan."""
    return FitRow(
        varied=dict(varied),
        layout=setup.layout or "",
        mesh="",
        verdict="unknown",
        peak=None,
        kinds={},
        held=None,
        step_time=None,
        remark=reason,
    )
