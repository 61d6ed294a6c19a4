"""Registry of export targets; each module of this package registers its targets."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.exports.expressed import Expressed
from autoshard.exports.outline import Outline

Export = Callable[[Outline], str]
Measure = Callable[[Outline], Expressed]


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A framework or format to which plans can be exported.

    Attributes:
        export: function from an outline to the exported text.
        media_type: media type of the text.
        format: description of the text's format, for documentation.
        content: description of the text's content, for documentation.
        expresses: function from an outline to the share of the plan that the text expresses; None
            if the text is a table of the plan, and not settings or code to run.
        pipelines: True if plans with several stages can be exported.
    """

    export: Export
    media_type: str
    format: str
    content: str
    expresses: Measure | None = None
    pipelines: bool = False


EXPORT_TARGETS: dict[str, ExportTarget] = {}
"""All export targets by name."""


def export_target(
    name: str,
    *,
    media_type: str,
    written_as: str,
    content: str,
    expresses: Measure | None = None,
    pipelines: bool = False,
) -> Callable[[Export], Export]:
    """Decorator that registers a function as an export target.

    Args:
        name: name of the target.
        media_type: media type of the text.
        written_as: description of the text's format.
        content: description of the text's content.
        expresses: function that measures the share of a plan that the text expresses.
        pipelines: True if plans with several stages can be exported.
    """

    def add(export: Export) -> Export:
        EXPORT_TARGETS[name] = ExportTarget(
            export, media_type, written_as, content, expresses, pipelines
        )
        return export

    return add
