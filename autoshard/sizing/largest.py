"""The largest batch, or the longest sequence, of a configuration that fits."""

from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.base.arguments import Count, check_arguments
from autoshard.errors import InputError
from autoshard.graph import GraphLike
from autoshard.mesh import Topology
from autoshard.plan.options import PlanOptions, to_options
from autoshard.requests.running import ProgressListener
from autoshard.sizing.fit import Sizing, budget_of, changed_options
from autoshard.sizing.layouts import Offload, Setup
from autoshard.sizing.models import ResizableModel, exported_size
from autoshard.sizing.results import Dimension, FitRow, Largest

_MOST_SECANTS = 4
"""Number of sizes from which the next one is guessed, beyond the first two."""
_MOST = 1 << 20
"""Largest number of units that is tried."""


@check_arguments
def find_largest(
    model: GraphLike,
    gpus: Count,
    name: Dimension,
    *,
    layout: str,
    topology: str | Topology | None = None,
    nodes: Count | None = None,
    gpus_per_node: Count | None = None,
    batch_size: Count | None = None,
    seq_length: Count | None = None,
    mixed_precision: str | None = None,
    offload: Offload = "none",
    options: PlanOptions | None = None,
    on_progress: ProgressListener | None = None,
    **single_options: Any,
) -> Largest:
    """The largest batch, or the longest sequence, that fits some devices in a layout.

    Args:
        model: as for `fit_model`.
        gpus: number of devices.
        name: `batch_size` or `seq_length`.
        layout: such as `fsdp2`; see `read_like`.
        topology: as for `fit_model`.
        nodes: as for `make_mesh`.
        gpus_per_node: as for `make_mesh`.
        batch_size: samples of a step, if the sequence is asked for.
        seq_length: tokens of each sample, if the batch is asked for.
        mixed_precision: as for `fit_model`.
        offload: as for `fit_model`.
        options: of planning.
        on_progress: called with the progress of each plan.
        **single_options: single members of `PlanOptions`, which replace those of `options`.

    Raises:
        GraphError: the model cannot be exported or planned.
        OptionError: the model has one size only, or the layout does not exist.

    Example:
        >>> found = find_largest("llama/config.json", 8, "batch_size", layout="fsdp2")
        >>> print(found.size)
    """
    asked = to_options(options, single_options)
    setup = Setup(
        gpus=gpus,
        layout=layout,
        batch_size=batch_size,
        seq_length=seq_length,
        mixed_precision=mixed_precision or "",
        offload=offload,
        topology=topology,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        options=asked,
        overrides=changed_options(asked),
    )
    return largest_of_setup(model, setup, name, on_progress=on_progress)


def largest_of_setup(
    model: GraphLike,
    setup: Setup,
    name: Dimension,
    *,
    on_progress: ProgressListener | None = None,
) -> Largest:
    """The largest size of a configuration that fits, and the next one, which does not.

    A linear model of the memory of two sizes says where to look; both sizes of the answer are
    planned. That more samples or tokens need more memory is taken for granted.

    Args:
        model: as for `fit_model`.
        setup: the configuration; its own size does not matter.
        name: of the size.
        on_progress: as for `fit_model`.

    Raises:
        GraphError: the model cannot be exported or planned.
        OptionError: the model has one size only, or the layout does not exist.
    """
    resizable = ResizableModel(model, setup.options.mode)
    sizing = Sizing(resizable, on_progress, any_batch_size=name == "batch_size")
    return _LargestSearch(sizing, setup, name).run()


@dataclass
class _LargestSearch:
    """Searches the largest number of units that fits.

    Attributes:
        known: the row of each number of units that was tried; None where the model has no such
            size.
        reason: why a size does not exist.
    """

    sizing: Sizing
    setup: Setup
    name: Dimension
    known: dict[int, FitRow | None] = field(default_factory=dict)
    reason: str = ""

    @property
    def unit(self) -> int:
        """The sizes that are tried are multiples of it."""
        is_batch = self.name == "batch_size"
        return self.setup.batch_unit if is_batch else self.setup.sequence_unit

    def run(self) -> Largest:
        """The answer."""
        fitting, failing = 0, _MOST + 1
        number = self._first_guess()
        step = 1
        while failing - fitting > 1:
            number = min(max(number, fitting + 1), failing - 1)
            if self._fits(number):
                fitting, following = number, number + step
            else:
                failing, following = number, number - step
            # The first guess is mostly right; if not, steps double until it is between two sizes.
            is_between = fitting > 0 and failing <= _MOST
            number = (fitting + failing) // 2 if is_between and step > 1 else following
            step *= 2
        row = self._row(fitting or 1)
        if row is None:
            raise InputError(self.reason)
        return Largest(
            name=self.name,
            unit=self.unit,
            size=fitting * self.unit if fitting else None,
            row=row,
            beyond=self.known.get(fitting + 1) if fitting else None,
            remark=self.reason,
        )

    def _first_guess(self) -> int:
        """The number of units at which memory reaches the budget, by secants through two sizes."""
        now = exported_size(self.sizing.graph(self.setup), 0 if self.name == "batch_size" else 1)
        if self.name == "batch_size":
            now = (now or 0) * self.setup.options.training.micro_batches
        number = max((now or 0) // self.unit, 1)
        budget = budget_of(*self.setup.placed())
        other, needed = 2 * number, self._least(2 * number)
        for _ in range(_MOST_SECANTS):
            before, least = needed, self._least(number)
            if least is None or before is None or (other - number) * (before - least) <= 0:
                break
            further = (budget - least) * (other - number) // (before - least)
            other, needed, number = number, least, max(number + further, 1)
            if abs(number - other) <= 1:
                break
        return number

    def _least(self, number: int) -> int | None:
        """The memory of a number of units with everything recomputed that may be; None without."""
        try:
            made = self.sizing.smallest(self._at(number))
        except InputError:
            return None
        return None if made.memory is None else made.memory.peak

    def _at(self, number: int) -> Setup:
        size = number * self.unit
        if self.name == "batch_size":
            return replace(self.setup, batch_size=size)
        return replace(self.setup, seq_length=size)

    def _fits(self, number: int) -> bool:
        row = self._row(number)
        return row is not None and row.verdict == "fits"

    def _row(self, number: int) -> FitRow | None:
        if number not in self.known:
            setup = self._at(number)
            varied: dict[str, str] = {self.name: str(number * self.unit)}
            try:
                self.sizing.graph(setup)
                self.known[number] = self.sizing.row(setup, varied)
            except InputError as error:
                self.known[number], self.reason = None, str(error)
        return self.known[number]
