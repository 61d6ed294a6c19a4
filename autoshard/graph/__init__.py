"""Loading of exported archives into immutable graphs; torch is needed only to export a model."""

from typing import TYPE_CHECKING

from autoshard.base.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.graph.archive.read import (
        Archive,
        ArchiveLimits,
        operator_namespaces,
        read_archive,
    )
    from autoshard.graph.blocks import (
        Block,
        find_blocks,
    )
    from autoshard.graph.checks import (
        MAX_RULES,
        RULES_VERSION,
        check_total_bytes,
    )
    from autoshard.graph.dtype import DType
    from autoshard.graph.export.model import export_model
    from autoshard.graph.ir import (
        Argument,
        CallRule,
        DimFactors,
        ExportedModel,
        Graph,
        Input,
        InputKind,
        Letters,
        Node,
        Origin,
        Output,
        Ref,
        Tensor,
        Token,
        TokenKind,
        anonymous,
        references,
    )
    from autoshard.graph.load import load_graph
    from autoshard.graph.mixed_precision import MixedPrecision
    from autoshard.graph.opaque_call import (
        OPAQUE_MODULE,
        OpaqueCall,
        OpaqueModule,
    )
    from autoshard.graph.paths import layer_path, module_paths
    from autoshard.graph.serialise import (
        graph_digest,
        graph_from_json,
        graph_to_json,
        resized,
        rules_from_json,
        rules_to_json,
    )
    from autoshard.graph.shortening import (
        Shortened,
        shorten,
    )
    from autoshard.graph.sources import GraphLike, graph_source, is_graph_file, to_graph
    from autoshard.graph.stages import (
        CutPoint,
        StageCutter,
    )
    from autoshard.graph.training_mode import training_modules
    from autoshard.graph.two_batches import with_dynamic_batch
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "MAX_RULES",
    "OPAQUE_MODULE",
    "RULES_VERSION",
    "Archive",
    "ArchiveLimits",
    "Argument",
    "Block",
    "CallRule",
    "CutPoint",
    "DType",
    "DimFactors",
    "ExportedModel",
    "Graph",
    "GraphLike",
    "Input",
    "InputKind",
    "Letters",
    "MixedPrecision",
    "Node",
    "OpaqueCall",
    "OpaqueModule",
    "Origin",
    "Output",
    "Ref",
    "Shortened",
    "StageCutter",
    "Tensor",
    "Token",
    "TokenKind",
    "anonymous",
    "check_total_bytes",
    "export_model",
    "find_blocks",
    "graph_digest",
    "graph_from_json",
    "graph_source",
    "graph_to_json",
    "is_graph_file",
    "layer_path",
    "load_graph",
    "module_paths",
    "operator_namespaces",
    "read_archive",
    "references",
    "resized",
    "rules_from_json",
    "rules_to_json",
    "shorten",
    "to_graph",
    "training_modules",
    "with_dynamic_batch",
]
