"""DTensor placements of parameters and buffers, by name."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from autoshard.base.names import did_you_mean
from autoshard.errors import UnknownNameError
from autoshard.layouts import Layout, to_placements

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


class TensorPlacements(Mapping[str, "tuple[Placement, ...]"]):
    """The placement of each parameter and buffer on each mesh axis, as objects of DTensor.

    Importing torch waits for the first placement that is read.

    Args:
        layouts: layout of each tensor by name, and the sizes of the axes.

    Raises:
        UnknownNameError: on access, there is no such tensor; the message names similar ones.
        LayoutError: on access, DTensor has no placement for the layout.
    """

    def __init__(self, layouts: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self._layouts = layouts

    def __getitem__(self, name: str) -> "tuple[Placement, ...]":
        if name not in self._layouts:
            hint = did_you_mean(str(name), self._layouts)
            raise UnknownNameError(f"the plan has no parameter or buffer {name!r}{hint}")
        layout, sizes = self._layouts[name]
        return to_placements(Layout.parse(layout), sizes)

    def __contains__(self, name: object) -> bool:
        return name in self._layouts

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __repr__(self) -> str:
        return f"<placements of {len(self)} parameters and buffers>"
