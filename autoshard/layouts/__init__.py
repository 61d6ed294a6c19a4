"""SPMD types, layouts and reshardings; independent of graphs and meshes."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.layouts.chains import ChainCosts
    from autoshard.layouts.layout import (
        AxisType,
        I,
        Kind,
        Layout,
        P,
        R,
        S,
        can_be_sharded,
        largest_shard,
        legal_layouts,
        parse_type,
        relative_sizes,
        shards_unevenly,
    )
    from autoshard.layouts.notation import (
        Notation,
        layout_words,
        legend,
        text_words,
        texts_words,
    )
    from autoshard.layouts.placements import (
        from_placements,
        has_placements,
        layout_of_texts,
        placement_texts,
        to_placements,
    )
    from autoshard.layouts.resharding import (
        ReshardingTable,
    )
    from autoshard.layouts.steps import (
        ALONE,
        STEPS,
        Action,
        Charge,
        Pricer,
        Step,
        is_bucketable,
        is_padded,
        step_price,
    )
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "ALONE",
    "STEPS",
    "Action",
    "AxisType",
    "ChainCosts",
    "Charge",
    "I",
    "Kind",
    "Layout",
    "Notation",
    "P",
    "Pricer",
    "R",
    "ReshardingTable",
    "S",
    "Step",
    "can_be_sharded",
    "from_placements",
    "has_placements",
    "is_bucketable",
    "is_padded",
    "largest_shard",
    "layout_of_texts",
    "layout_words",
    "legal_layouts",
    "legend",
    "parse_type",
    "placement_texts",
    "relative_sizes",
    "shards_unevenly",
    "step_price",
    "text_words",
    "texts_words",
    "to_placements",
]
