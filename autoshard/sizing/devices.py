"""`size_model`: the fewest devices that reach a throughput, and the cheapest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from autoshard.base.arguments import Count, check_arguments
from autoshard.errors import OptionError
from autoshard.graph import GraphLike
from autoshard.mesh import DEFAULT_TOPOLOGY, Topology, get_topology
from autoshard.plan.options import PlanOptions, to_options
from autoshard.plan.options.training import MAX_MICRO_BATCHES
from autoshard.planner.memory.least_memory import LeastMemory
from autoshard.pricing.throughput import program_work
from autoshard.requests.running import ProgressListener
from autoshard.sizing.fit import Sizing, changed_options, usual_layouts, without_plan
from autoshard.sizing.layouts import Setup
from autoshard.sizing.models import ResizableModel, exported_size
from autoshard.sizing.results import DeviceCount, FitRow, Size

_DAY = 86_400.0
_MORE = 2
"""Numbers of devices that are priced beyond the fewest, which may be cheaper."""


@check_arguments
def size_model(
    model: GraphLike,
    *,
    tokens_per_second: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    price: float | None = None,
    batch_size: Count | None = None,
    seq_length: Count | None = None,
    topology: str | Topology | None = None,
    layout: str | None = None,
    max_gpus: Count = 16_384,
    options: PlanOptions | None = None,
    on_progress: ProgressListener | None = None,
    **single_options: Any,
) -> Size:
    """The fewest devices that train or run a model fast enough, and the cheapest of the next ones.

    Numbers of devices are powers of two up to a node, then a node times powers of two. Those whose
    memory, or whose arithmetic at the peak rate of the device, cannot be enough are left out. For
    each of the others the usual layouts are priced, first with micro-batches of one sample for each
    data-parallel rank, then with larger ones as long as they are faster; the fastest one counts.

    Args:
        model: as for `fit_model`.
        tokens_per_second: that a step must reach, of all devices together.
        tokens: number of tokens of the training, in place of a throughput, with `days`.
        days: within which they must be processed.
        price: of a device for an hour, in any currency.
        batch_size: samples of a step, in all micro-batches; needed for a config.
        seq_length: tokens of each sample; that of the graph if None.
        topology: as for `fit_model`; a large cluster of its nodes.
        layout: the only layout that is priced; the usual ones if None.
        max_gpus: the largest number of devices.
        options: of planning.
        on_progress: called with the progress of each plan.
        **single_options: single members of `PlanOptions`, which replace those of `options`.

    Raises:
        GraphError: the model cannot be exported or planned.
        MeshError: the topology is unknown.
        OptionError: there is no throughput, or the batch is not given.

    Example:
        >>> found = size_model("llama/config.json", tokens=1e12, days=20, batch_size=1024)
        >>> print(found.fewest, [row.num_devices for row in found.rows])
    """
    # The numbers of micro-batches that are tried take the place of one that is given.
    asked = to_options(options, single_options).with_values(micro_batches=1)
    if price is not None and not 0 < price < inf:
        raise OptionError(f"price is {price}; give the price of a device for an hour, above 0")
    target = _target(tokens_per_second, tokens, days)
    setup = Setup(
        gpus=1,
        layout=layout or "fsdp2",
        batch_size=batch_size,
        seq_length=seq_length,
        topology=topology,
        options=asked,
        overrides=changed_options(asked),
    )
    sizing = Sizing(ResizableModel(model, asked.mode), on_progress, any_batch_size=True)
    search = _Devices(sizing, setup, target, None if layout is None else (layout,), max_gpus)
    rows = tuple(search.rows())
    return search.result(rows, tokens=tokens, price=price)


def _target(rate: float | None, tokens: float | None, days: float | None) -> float:
    """Tokens per second."""
    if (rate is None) == (tokens is None) or (tokens is None) != (days is None):
        raise OptionError("give tokens_per_second, or tokens and days")
    for name, value in (("tokens_per_second", rate), ("tokens", tokens), ("days", days)):
        if value is not None and not 0 < value < inf:
            raise OptionError(f"{name} is {value}; give a number above 0")
    return rate if rate is not None else (tokens or 0.0) / ((days or 1.0) * _DAY)


@dataclass
class _Devices:
    """Prices a model on more and more devices, until the throughput is reached.

    Attributes:
        sizing: prices configurations.
        setup: the configuration on one device.
        target: tokens per second.
        layouts: those that are priced; the usual ones of each number of devices if None.
        most: largest number of devices.
    """

    sizing: Sizing
    setup: Setup
    target: float
    layouts: Sequence[str] | None
    most: int

    def rows(self) -> Iterator[DeviceCount]:
        """The numbers of devices that are priced, in order."""
        more = _MORE
        least = max(self.least_by_memory, self.least_by_arithmetic)
        for number in self._numbers():
            if number < least:
                continue
            row = self._row(number)
            yield row
            more -= row.reaches
            if more < 0:
                break

    @property
    def batch(self) -> tuple[int, int]:
        """Samples of a step, and tokens of each.

        Raises:
            OptionError: the batch is not given, or the model does not take tokens.
        """
        graph = self.sizing.graph(self.setup)
        samples, tokens = exported_size(graph, 0), exported_size(graph, 1)
        if samples is None or tokens is None:
            raise OptionError("the model does not take tokens, so it has no tokens per second")
        return self.setup.batch_size or samples, tokens

    @property
    def least_by_memory(self) -> int:
        """Number of devices whose memory holds the state of the model."""
        found = LeastMemory.of(self.sizing.graph(self.setup), *self.setup.placed())
        return -(-found.stored // found.budget)

    @property
    def least_by_arithmetic(self) -> int:
        """Number of devices that reach the throughput at the peak rate of the device."""
        samples, tokens = self.batch
        mesh, options = self.setup.placed()
        work = program_work(self.sizing.graph(self.setup), options.with_values(micro_batches=1))
        device = mesh.topology.device
        seconds = sum(flops / device.peak(dtype) for dtype, flops in work.flops.items())
        return max(ceil(self.target * seconds / (samples * tokens)), 1)

    def _numbers(self) -> Iterator[int]:
        """Powers of two up to a node, then nodes times powers of two."""
        named = self.setup.topology or DEFAULT_TOPOLOGY
        known = named if isinstance(named, Topology) else get_topology(named)
        node = known.devices_per_node or 1
        number = 1
        while number <= self.most:
            yield number
            number = node if number < node < 2 * number else 2 * number

    def _row(self, number: int) -> DeviceCount:
        """The fastest layout on a number of devices."""
        samples, tokens = self.batch
        at = replace(self.setup, gpus=number)
        tried = [self._priced(at, name) for name in self.layouts or usual_layouts(at)]
        found = [one for one in tried if one[0].step_time is not None]
        mesh = at.placed()[0].description
        if not found:
            reason = "; ".join(f"{row.layout}: {row.remark}" for row, _ in tried if row.remark)
            return DeviceCount(num_devices=number, hardware=mesh, reaches=False, remark=reason)
        row, micro_batches = min(found, key=_seconds)
        assert row.step_time is not None
        rate = samples * tokens / row.step_time
        return DeviceCount(
            num_devices=number,
            hardware=mesh,
            reaches=rate >= self.target,
            layout=row.layout,
            micro_batches=micro_batches,
            step_time=row.step_time,
            tokens_per_second=rate,
            peak=row.peak,
        )

    def _priced(self, at: Setup, layout: str) -> tuple[FitRow, int]:
        """The row of a layout, and its number of micro-batches."""
        setup = replace(at, layout=layout)
        best: tuple[FitRow, int] | None = None
        for number in reversed(list(self._micro_batches(setup))):
            options = setup.options.with_values(micro_batches=number)
            found = self.sizing.row(replace(setup, options=options), {}), number
            if best is not None and _seconds(found) > _seconds(best):
                break
            best = found
            # Larger micro-batches need more memory. A batch of one may be no size of the graph.
            if found[0].verdict == "does not fit":
                break
        if best is None:
            reason = f"{setup.batch_unit} ranks do not divide a batch of {self.batch[0]}"
            return without_plan(setup, {}, reason), 1
        return best

    def _micro_batches(self, setup: Setup) -> Iterator[int]:
        """Numbers of micro-batches that the ranks can share, few first."""
        samples, number = self.batch[0], 1
        while number <= min(samples, MAX_MICRO_BATCHES):
            if samples % (number * setup.batch_unit) == 0:
                yield number
            number *= 2

    def result(
        self, rows: tuple[DeviceCount, ...], *, tokens: float | None, price: float | None
    ) -> Size:
        """The document of some rows, with days and prices."""
        priced = tuple(_with_price(row, tokens, price) for row in rows)
        enough = [row for row in priced if row.reaches]
        cheapest = min(enough, key=lambda row: row.price or inf) if price and enough else None
        samples, length = self.batch
        graph = self.sizing.graph(self.setup)
        return Size(
            model=graph.model.name if graph.model is not None and graph.model.name else "Model",
            batch_size=samples,
            seq_length=length,
            target=self.target,
            least_by_memory=self.least_by_memory,
            least_by_arithmetic=self.least_by_arithmetic,
            rows=priced,
            fewest=enough[0].num_devices if enough else None,
            cheapest=None if cheapest is None else cheapest.num_devices,
            tokens=tokens,
        )


def _with_price(row: DeviceCount, tokens: float | None, price: float | None) -> DeviceCount:
    """A row with the days and the price of all tokens, or of a thousand million."""
    if row.tokens_per_second is None:
        return row
    seconds = (tokens or 1e9) / row.tokens_per_second
    update = {
        "days": seconds / _DAY if tokens else None,
        "price": None if price is None else price * row.num_devices * seconds / 3600,
    }
    return row.model_copy(update=update)


def _seconds(found: tuple[FitRow, int]) -> float:
    """Seconds of a step; inf if it does not fit."""
    return found[0].step_time or inf
