"""The layout algebra: types, layouts, reshardings. Knows neither graphs nor meshes."""

from autoshard.layouts.layout import (
    Layout,
    can_be_cut,
    cuts_unevenly,
    largest_share,
    legal_layouts,
)
from autoshard.layouts.placements import (
    from_placements,
    has_placements,
    layout_of_texts,
    placement_texts,
    to_placements,
)
from autoshard.layouts.resharding import (
    STEPS,
    Action,
    Pricer,
    ReshardingTable,
    Step,
    again_price,
    is_padded,
    makes_whole,
    step_price,
)
from autoshard.layouts.types import AxisType, I, Kind, P, R, S, parse_type, reduced

__all__ = [
    "STEPS",
    "Action",
    "AxisType",
    "I",
    "Kind",
    "Layout",
    "P",
    "Pricer",
    "R",
    "ReshardingTable",
    "S",
    "Step",
    "again_price",
    "can_be_cut",
    "cuts_unevenly",
    "from_placements",
    "has_placements",
    "is_padded",
    "largest_share",
    "layout_of_texts",
    "legal_layouts",
    "makes_whole",
    "parse_type",
    "placement_texts",
    "reduced",
    "step_price",
    "to_placements",
]
