"""Modules that are kept whole: one operator of the graph, which calls a module of the model.

The node's `module` is the dotted name of the module in the model. This file does not need torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationError

from autoshard.base.arguments import Work, check_methods
from autoshard.base.schemas import type_adapter
from autoshard.errors import SchemaError
from autoshard.graph.dtype import DType
from autoshard.graph.ir import Literal

OPAQUE_MODULE = "autoshard.opaque_module.default"
"""tensors[], state[], call, flops, saved_bytes, along_batch, random -> results and new contents
of buffers[]."""


@check_methods
@dataclass(frozen=True)
class OpaqueModule:
    """A module that `export_model` keeps whole instead of tracing it.

    Its forward runs as Python code on every rank, with full tensors unless the batch is sharded.

    Attributes:
        module: dotted name of a module, or a class of modules.
        along_batch: True to let plans shard dim 0 of its tensors. Rows must not depend on each
            other, which is tested on random inputs.
        outputs: a function of the arguments of forward that returns tensors with the shapes and
            dtypes of the results. Without it, the module runs once on random inputs, which also
            counts its floating-point operations and the memory that autograd saves.
        flops: floating-point operations of forward; None to count them.
    """

    module: str | type
    along_batch: bool = False
    outputs: Callable[..., Any] | None = None
    flops: Work | None = None


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """Call of an opaque module, apart from its tensors.

    Attributes:
        arguments: PyTorch's JSON tree spec of (args, kwargs).
        literals: arguments that are no tensors, with their positions among the leaves.
        state: names of the module's parameters and buffers, relative to it.
        updated: those of the buffers that forward updates; their new contents follow the results.
        results: shape and dtype of each tensor that forward returns.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    arguments: str
    literals: tuple[tuple[int, Literal], ...]
    state: tuple[str, ...]
    updated: tuple[str, ...]
    results: tuple[tuple[tuple[int, ...], DType], ...]

    def to_json(self) -> str:
        """The call as JSON, an argument of the operator."""
        return type_adapter(OpaqueCall).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: object) -> "OpaqueCall":
        """Read a call.

        Raises:
            SchemaError: the text is not a call.
        """
        try:
            return type_adapter(OpaqueCall).validate_json(str(text))
        except ValidationError:
            raise SchemaError("the call of an opaque module cannot be read") from None
