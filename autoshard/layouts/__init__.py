"""The layout algebra: types, layouts, conversions. Knows neither graphs nor meshes."""

from autoshard.layouts.conversions import (
    STEPS,
    Action,
    Conversions,
    Pricer,
    Step,
    step_price,
)
from autoshard.layouts.layout import Layout, legal_layouts
from autoshard.layouts.types import AxisType, I, Kind, P, R, S, parse_type

__all__ = [
    "STEPS",
    "Action",
    "AxisType",
    "Conversions",
    "I",
    "Kind",
    "Layout",
    "P",
    "Pricer",
    "R",
    "S",
    "Step",
    "legal_layouts",
    "parse_type",
    "step_price",
]
