"""Errors of predicted step times: how far published training runs were from their predictions.

The table `accuracy.json` is written by `python -m benchmarks.published --accuracy`, from the
predictions of runs that others published (docs/predictions.md).
"""

from enum import StrEnum
from functools import cache
from pathlib import Path

from pydantic import Field, TypeAdapter

from autoshard.mesh import Mesh, generation_of
from autoshard.plan.predictions import Document, error_percent

QUANTILE = 0.8
"""Share of the published runs whose step times are within the error of a row."""

TABLE = Path(__file__).with_suffix(".json")
"""File of the table."""


class LayoutCategory(StrEnum):
    """What a step does, as far as the errors of predictions depend on it."""

    DATA_PARALLEL = "data parallel or FSDP"
    MODEL_PARALLEL = "tensor, context or pipeline parallel"
    EXPERTS = "mixture of experts"
    DECODING = "decoding"


class Accuracy(Document):
    """Error of the predicted step times of one category on one generation of GPUs."""

    category: LayoutCategory
    generation: str = Field(description="of GPUs, such as Hopper")
    num_runs: int = Field(ge=1, description="number of published runs that were predicted")
    error: float = Field(
        ge=0,
        description="relative to the predicted time: `QUANTILE` of the runs took at most this "
        "share more or less than predicted",
    )

    @property
    def statement(self) -> str:
        """The row in words."""
        return (
            f"{100 * QUANTILE:.0f} % of {self.num_runs} published runs ({self.category}, "
            f"{self.generation} GPUs, communication overlapped) were within "
            f"{error_percent(self.error)} of their predictions"
        )


ROWS = TypeAdapter(tuple[Accuracy, ...])
"""Reads and writes the rows of the table."""


def find_accuracy(category: LayoutCategory | None, mesh: Mesh) -> Accuracy | None:
    """The row of a category on the hardware of a mesh; None if nothing was compared.

    Args:
        category: of the step; None if no published run does the like.
        mesh: the devices.
    """
    generation = hardware_of(mesh)
    found = (row for row in _rows() if (row.category, row.generation) == (category, generation))
    return next(found, None)


def hardware_of(mesh: Mesh) -> str | None:
    """The generation of GPUs whose runs are compared; None for other prices than a preset's."""
    return generation_of(mesh.topology) if mesh.collectives is None else None


@cache
def _rows() -> tuple[Accuracy, ...]:
    return ROWS.validate_json(TABLE.read_bytes())
