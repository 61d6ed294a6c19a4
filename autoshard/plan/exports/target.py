"""The list of export targets; each module of this package adds its own."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.plan.exports.outline import Outline

Export = Callable[[Outline], str]


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A framework or format that plans are exported to.

    Attributes:
        export: makes the text of a plan.
        media_type: of the text.
        format: of the text, for people.
        content: in words, for people.
    """

    export: Export
    media_type: str
    format: str
    content: str


EXPORT_TARGETS: dict[str, ExportTarget] = {}
"""Every target, by name."""


def export_target(
    name: str, *, media_type: str, written_as: str, content: str
) -> Callable[[Export], Export]:
    """Make a function an export target.

    Args:
        name: of the target.
        media_type: as `ExportTarget` has it.
        written_as: the `format`.
        content: likewise.
    """

    def add(export: Export) -> Export:
        EXPORT_TARGETS[name] = ExportTarget(export, media_type, written_as, content)
        return export

    return add
