"""The answer to a request: a verdict, and tables of layouts, layers, costs and memory.

`answer_of(plan)` holds what the summary of a plan prints, for pages, notebooks and programs.
"""

from collections.abc import Iterator, Sequence
from math import floor

from pydantic import Field

from autoshard.base.outcome import SolveStatus
from autoshard.base.quantities import format_bytes
from autoshard.costs import parameter_bytes
from autoshard.graph import DType, graph_from_json
from autoshard.lowering.timeline import KINDS
from autoshard.mesh import mesh_text
from autoshard.plan.comparisons import Baseline, RunAgain, Unrestricted
from autoshard.plan.document import Plan
from autoshard.plan.options import OWN_RUNTIME, Family, Mode
from autoshard.plan.predictions import Bytes, Document, Performance, Seconds, step_time
from autoshard.pricing.axis_roles import Roles, find_roles, percent
from autoshard.pricing.performance import plan_performance
from autoshard.pricing.prices import optimizer_of
from autoshard.pricing.throughput import batch_of
from autoshard.report.cost_items import cost_items
from autoshard.report.layer_table import LayerRow, layer_rows, layout_name
from autoshard.report.plain_words import runs_again, step_sentences

SIMPLEST_FIRST: Sequence[Family] = ("ddp", "fsdp2", "hsdp", "megatron", "megatron-sp")
"""Families of layouts in the order of what a user has to do for them; a planned layout is last."""

WITHIN = 0.02
"""Share by which a simpler layout may be slower than the fastest, by default."""

_LISTED = 0.01
"""Least share of a step that is an item of costs of its own."""

_LATE = frozenset({SolveStatus.TIMED_OUT, SolveStatus.CANCELLED})

_NEEDS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "fully_shard",
    "hsdp": "fully_shard on a 2-D mesh",
    "megatron": "tensor-parallel layers",
    "megatron-sp": "tensor-parallel layers, sequence parallel",
}
"""Code or setting of PyTorch or Megatron-LM for each family."""


class LayoutRow(Document):
    """One layout of a request: the plan, or the best form of a family."""

    name: str = Field(description="in the words of the field, such as 'HSDP 2 x 4'")
    algo: Family | None = Field(description="the family; null for the plan itself")
    axes: tuple[tuple[str, int], ...] = Field(description="of its mesh, outermost first")
    distributed_optimizer: bool = False
    micro_batches: int = 1
    seconds: Seconds | None = Field(description="predicted, of a step; null if there is no plan")
    performance: Performance | None = None
    rate: float | None = Field(
        default=None, description="tokens per second and device; samples if there are no tokens"
    )
    memory: Bytes | None = None
    needs: str = Field(description="what a user does to run it; or why it is not possible")


class CostShare(Document):
    """A part of the predicted time of a step."""

    name: str
    seconds: float = Field(description="negative for what overlaps with other parts")
    percent: int = Field(description="of the step, rounded so that all parts sum to 100")


class Answer(Document):
    """The answer of a plan to a person: all that its summary prints."""

    asked: tuple[str, ...] = Field(description="the request as understood, in sentences")
    verdict: str
    prediction: str = Field(description="step time, throughput, MFU and memory of the plan")
    within: float
    layouts: tuple[LayoutRow, ...] = Field(description="the plan first, then the families")
    best: int = Field(description="index of the fastest of the layouts")
    simplest: int = Field(description="index of the simplest within `within` of the fastest")
    axes: tuple[str, ...] = Field(description="axes of the mesh, such as 'dp=2'")
    layers: tuple[LayerRow, ...]
    step: tuple[str, ...] = Field(description="pipeline, recomputation, micro-batches: sentences")
    costs: tuple[CostShare, ...] = Field(description="they sum to the step, the largest first")
    memory: dict[str, int] = Field(description="bytes per device at the peak by kind")
    peak: Bytes
    budget: int = Field(description="bytes per device: the memory budget, or the device's memory")
    sources: str = Field(description="where the figures come from, and their error")
    certificate: str


def answer_of(plan: Plan, *, within: float = WITHIN) -> Answer:
    """The answer of a plan.

    Args:
        plan: a plan with stages; with the option `comparisons`, other layouts are in its table.
        within: share by which the simplest layout may be slower than the fastest.

    Example:
        >>> found = answer_of(make_plan(graph, "2x4", comparisons=True))
        >>> found.layouts[found.simplest].name
        'FSDP2 8'
    """
    assert plan.costs is not None
    assert plan.memory is not None
    roles, again = find_roles(plan), runs_again(plan)
    performance = plan.performance or plan_performance(plan)
    rows = tuple(_rows(plan, roles, again, performance))
    seconds = [row.seconds or float("inf") for row in rows]
    best = min(range(len(rows)), key=seconds.__getitem__)
    near = [i for i, time in enumerate(seconds) if time <= (1 + within) * seconds[best]]
    simplest = min(near, key=lambda i: _rank(rows[i]))
    return Answer(
        asked=tuple(asked(plan)),
        verdict=_verdict(rows, best, simplest, within),
        prediction=prediction(plan, performance),
        within=within,
        layouts=rows,
        best=best,
        simplest=simplest,
        axes=tuple(f"{name}={size}" for name, size in roles.sizes.items()),
        layers=layer_rows(roles),
        step=step_sentences(plan, again),
        costs=tuple(_costs(plan)),
        memory={kind: getattr(plan.memory, kind) for kind in KINDS},
        peak=plan.memory.peak,
        budget=_budget(plan),
        sources=_sources(plan, performance),
        certificate=plan.certificate_statement,
    )


def headline(plan: Plan) -> str:
    """A plan in one line: its mesh, its layout in the words of the field, step and memory.

    Args:
        plan: a plan, not a document without one.
    """
    performance = plan.performance or plan_performance(plan)
    name = layout_name(find_roles(plan))
    return f"mesh {mesh_text(plan.mesh)}: {name}. {prediction(plan, performance)}"


def asked(plan: Plan) -> Iterator[str]:
    """The request as understood: model and batch, devices, element types and optimizer."""
    graph = graph_from_json(plan.stages[0].program) if plan.found else None
    model = None if graph is None else graph.model
    name = model.name if model is not None and model.name else "Model"
    parts = [f"{name}, {plan.graph.num_parameters:,} parameters"]
    if plan.found:
        parts += [plan.graph.precision or "no floating-point tensors", *_batch(plan)]
    parts += [plan.options.mode]
    runtime = plan.options.runtime.name
    if runtime != OWN_RUNTIME:
        parts.append(f"priced for {runtime}, not for autoshard's runtime")
    yield ", ".join(parts)
    yield f"Devices: {plan.mesh.description}, mesh {mesh_text(plan.mesh)}"
    if plan.found and plan.options.mode == "training":
        yield _optimizer(plan)


def prediction(plan: Plan, performance: Performance) -> str:
    """Step time, throughput, MFU and memory of a plan, in one sentence."""
    assert plan.costs is not None
    assert plan.memory is not None
    parts = [f"Predicted step: {step_time(plan.costs.total, performance)}", *performance.rates]
    memory = f"{format_bytes(plan.memory.peak)} of {format_bytes(_budget(plan))}"
    return ", ".join([*parts, f"peak memory {memory} per device"])


def _batch(plan: Plan) -> Iterator[str]:
    batch = batch_of(plan)
    if batch is not None:
        tokens = "" if batch.tokens is None else f" x {batch.sequence} = {batch.tokens:,} tokens"
        number = plan.stages[0].micro_batches
        parts = f" in {number} micro-batches" if number > 1 else ""
        yield f"batch {batch.samples}{tokens} a step{parts}"


def _optimizer(plan: Plan) -> str:
    """The bytes kept of each parameter between steps, and the options that change them."""
    optimizer = optimizer_of(plan.options)
    programs = [graph_from_json(stage.program) for stage in plan.stages]
    trained = {
        placed.name: (placed.shape, DType(placed.dtype))
        for stage, program in zip(plan.stages, programs, strict=True)
        for placed in stage.parameters
        if program.values[placed.name].requires_grad
    }.values()
    kept = [parameter_bytes(shape, dtype, optimizer) for shape, dtype in trained]
    masters = sum(optimizer.master_nbytes(shape, dtype) for shape, dtype in trained)
    state = sum(one.optimizer for one in kept) - masters
    total, number = sum(one.total for one in kept), plan.graph.num_parameters
    is_narrow = any(dtype.itemsize < DType.FLOAT32.itemsize for _, dtype in trained)
    copies = "a float32 master copy of each parameter and " if masters else ""
    without = "" if masters or not is_narrow else ", no float32 master copies (master_weights)"
    each = f", {total / number:.3g} bytes a parameter" if number else ""
    return (
        f"Optimizer {plan.options.training.optimizer.value} keeps {copies}{format_bytes(state)} of "
        f"state{without}; with parameters and gradients {format_bytes(total)} in all{each}"
    )


def _rows(
    plan: Plan, roles: Roles, again: RunAgain, performance: Performance
) -> Iterator[LayoutRow]:
    assert plan.costs is not None
    assert plan.memory is not None
    mode, call = plan.options.mode, "parallelize" if plan.pipeline is None else "pipeline"
    yield LayoutRow(
        name=f"this plan: {layout_name(roles)}",
        algo=None,
        axes=tuple((axis.name, axis.size) for axis in plan.mesh.axes),
        micro_batches=plan.stages[0].micro_batches,
        seconds=plan.costs.total,
        performance=performance,
        rate=_rate(performance, plan),
        memory=plan.memory.peak,
        needs=", ".join([f"autoshard.{call}", *_settings(again, None, mode)]),
    )
    if plan.unrestricted is not None:
        yield _unrestricted(plan, plan.unrestricted)
    order = SIMPLEST_FIRST.index
    for baseline in sorted(plan.baselines, key=lambda baseline: order(baseline.algo)):
        yield _family(plan, baseline)


def _unrestricted(plan: Plan, free: Unrestricted) -> LayoutRow:
    found = free.costs is not None and free.memory is not None
    return LayoutRow(
        name="without restrictions",
        algo=None,
        axes=tuple((axis.name, axis.size) for axis in plan.mesh.axes),
        seconds=None if free.costs is None else free.costs.total,
        performance=free.performance,
        rate=_rate(free.performance, plan),
        memory=None if free.memory is None else free.memory.peak,
        needs="a plan without them" if found else "not found in the time for comparisons",
    )


def _family(plan: Plan, baseline: Baseline) -> LayoutRow:
    """The row of a family: its best form, or why it has none."""
    needs = [_NEEDS[baseline.algo]]
    needs += ["ZeRO-1"] if baseline.distributed_optimizer else []
    number = baseline.micro_batches
    if number != plan.stages[0].micro_batches:
        needs += [f"{number} micro-batches" if number > 1 else "one micro-batch"]
    needs += _settings(baseline.again, baseline.algo, plan.options.mode)
    needs += [remark.partition(",")[0] for remark in baseline.remarks]
    if not baseline.found:
        is_late = baseline.certificate is not None and baseline.certificate.status in _LATE
        needs = [baseline.reason if is_late else f"not possible: {baseline.reason}"]
        if baseline.needed_memory is not None:
            needs = [f"does not fit: needs {format_bytes(baseline.needed_memory)}"]
    return LayoutRow(
        name=_form(baseline),
        algo=baseline.algo,
        axes=baseline.axes,
        distributed_optimizer=baseline.distributed_optimizer,
        micro_batches=number,
        seconds=baseline.step_time,
        performance=baseline.performance,
        rate=_rate(baseline.performance, plan),
        memory=None if baseline.memory is None else baseline.memory.peak,
        needs=", ".join(needs),
    )


def _form(baseline: Baseline) -> str:
    """The form of a family in the words of the field, such as `HSDP 2 x 4` or `DP 4 x TP 2`."""
    sizes = dict(baseline.axes)
    if not sizes or baseline.algo in {"ddp", "fsdp2", "hsdp"}:
        name = {"fsdp2": "FSDP2"}.get(baseline.algo, baseline.name)
        return " ".join([name, " x ".join(map(str, sizes.values()))]).strip()
    parts = [f"{name.upper()} {size}" for name, size in sizes.items()]
    return " x ".join(parts) + (" + SP" if baseline.algo == "megatron-sp" else "")


def _settings(again: RunAgain | None, algo: Family | None, mode: Mode) -> Iterator[str]:
    """Gathers and computation that backward repeats, as settings of FSDP and of checkpointing."""
    if again is None or mode != "training":
        return
    if again.gathered and (again.gathered_again or algo not in {"megatron", "megatron-sp"}):
        share = again.gathered_again / again.gathered
        kinds = {0.0: "no reshard after forward", 1.0: "reshard after forward"}
        yield kinds.get(share, f"reshard after forward in {percent(share)} of gathers")
    if again.recomputed:
        yield f"checkpointing of {again.recomputed} of {again.blocks} blocks"


def _rate(performance: Performance | None, plan: Plan) -> float | None:
    if performance is None:
        return None
    rate = performance.tokens_per_second or performance.samples_per_second
    return None if rate is None else rate / plan.mesh.num_devices


def _rank(row: LayoutRow) -> int:
    return len(SIMPLEST_FIRST) if row.algo is None else SIMPLEST_FIRST.index(row.algo)


def _verdict(rows: Sequence[LayoutRow], best: int, simplest: int, within: float) -> str:
    """The simplest layout that is nearly as fast as the fastest, in a sentence."""
    limit = f"{100 * within:.3g} %"
    fastest = rows[best].seconds or 1.0
    row = rows[simplest]
    others = [r for r in rows if r.algo is not None and r.seconds is not None]
    if row.algo is not None:
        slower = (row.seconds or fastest) / fastest - 1
        compared = f"{100 * slower:.1f} % more" if slower else "and the fastest"
        shown = step_time(row.seconds or fastest, row.performance)
        return (
            f"{row.name} ({row.needs}) is the simplest layout within {limit} of the "
            f"fastest: {shown}, {compared}"
        )
    if not any(r.algo is not None for r in rows):
        return "this plan; it was not compared with the usual layouts"
    if not others:
        return "this plan: none of the usual layouts is possible"
    nearest = min(others, key=lambda r: r.seconds or fastest)
    slower = (nearest.seconds or fastest) / fastest - 1
    return (
        f"a planned layout: the fastest usual one, {nearest.name}, takes {100 * slower:.1f} % "
        f"more, so none is within {limit}"
    )


def _costs(plan: Plan) -> Iterator[CostShare]:
    items = cost_items(plan)
    large = [item for item in items if abs(item.share) >= _LISTED]
    parts = [(item.name, item.seconds, item.share) for item in large]
    rest = [item for item in items if abs(item.share) < _LISTED]
    if rest:
        name = rest[0].name if len(rest) == 1 else f"{len(rest)} smaller items"
        parts.append((name, sum(i.seconds for i in rest), sum(i.share for i in rest)))
    whole = whole_percents([share for _, _, share in parts])
    for (name, seconds, _), number in zip(parts, whole, strict=True):
        yield CostShare(name=name, seconds=seconds, percent=number)


def whole_percents(shares: Sequence[float]) -> list[int]:
    """Shares that sum to 1 in whole percent that sum to 100, by the largest remainders.

    >>> whole_percents([1 / 3, 1 / 3, 1 / 3])
    [34, 33, 33]
    """
    found = [floor(100 * share) for share in shares]
    left = sorted(range(len(shares)), key=lambda i: (found[i] - 100 * shares[i], i))
    for i in left[: 100 - sum(found)]:
        found[i] += 1
    return found


def _budget(plan: Plan) -> int:
    assert plan.memory is not None
    return plan.memory.budget or plan.mesh.topology.device.memory


def _sources(plan: Plan, performance: Performance) -> str:
    error = f"Step times: {performance.comparison}"
    if performance.error is None:
        error = f"The predicted time is {performance.comparison}"
    source = plan.mesh.topology.source
    rates = f". Rates of devices and links: {source}" if source else ""
    return f"{error}{rates}. Memory: counted from the tensors of the program."
