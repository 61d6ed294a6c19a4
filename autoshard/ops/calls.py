"""The operators that plans may call: which they are, and what planning says of the others.

Planning and running share these checks, so that a plan that is made can be applied. They need
torch, which planning imports only for operators without a sharding rule.
"""

from collections.abc import Collection
from typing import Any

import torch

from autoshard.errors import PlanError, UnsupportedError
from autoshard.graph import DType, Graph, Node, Token, TokenKind
from autoshard.ops.registry import has_rule
from autoshard.ops.rules.schema_checks import check_against_schema
from autoshard.torch_private import OpOverload, schema_of

_REFUSED = frozenset({"aten.from_file"})
"""ATen operators that access files: a plan may come from a server, and must not choose files."""


def resolve_operator(name: str, *, custom: Collection[str] = ()) -> OpOverload:
    """The PyTorch operator with a name such as `aten.add.Tensor`.

    Args:
        name: qualified name with the overload.
        custom: names of operators outside ATen that may be called.

    Raises:
        PlanError: there is no such operator, or a plan may not call it: it must be in ATen, have
            a sharding rule or be listed in `custom`, and it must not change its inputs.
    """
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    allowed = namespace == "aten" or has_rule(name) or name in custom
    if not allowed or f"{namespace}.{packet}" in _REFUSED:
        raise PlanError(
            f"the plan calls {name}, which is not an operator that plans may call; if it is one "
            f"of the model's own, pass custom_operators=['{namespace}::{packet}']"
        )
    found: Any = torch.ops
    for part in (namespace, packet, overload):
        found = getattr(found, part, None)
    if not overload or not isinstance(found, OpOverload):
        raise PlanError(
            f"the plan calls {name}, which torch {torch.__version__} does not have; use the "
            f"version that exported the model, or export it again"
        )
    schema = schema_of(found)
    if schema.is_mutable or not schema.returns:
        raise PlanError(f"the plan calls {name}, which writes into its inputs or returns nothing")
    return found


def check_call(node: Node, *, custom: Collection[str] = ()) -> None:
    """Check that plans may call the operator of a node, and that its schema takes the arguments.

    Args:
        node: the call.
        custom: names of operators outside ATen that may be called.

    Raises:
        PlanError: they may not, or it does not.
    """
    schema = schema_of(resolve_operator(node.operator, custom=custom))
    check_against_schema(node, schema)


_VALUES = {
    TokenKind.DTYPE: frozenset(DType),
    TokenKind.LAYOUT: frozenset({"strided"}),
    TokenKind.MEMORY_FORMAT: frozenset(
        {"contiguous_format", "channels_last", "channels_last_3d", "preserve_format"}
    ),
}


def check_token(node: Node, token: Token) -> None:
    """Check that plans run with a dtype, layout or memory format; any device is the rank's.

    Raises:
        PlanError: they do not.
    """
    if token.kind is not TokenKind.DEVICE and token.value not in _VALUES[token.kind]:
        raise PlanError(
            f"node {node.name!r} uses the {token.kind} {token.value!r}, which cannot run in a plan"
        )


def check_callable(graph: Graph) -> None:
    """Check that ranks will run the operators of a program that have no built-in rule.

    A model's own operators are checked if this process has them; `parallelize` is told which of
    them may run.

    Raises:
        UnsupportedError: they will not; the message has the node.
    """
    for node in (*graph.nodes, *(graph.preparation.nodes if graph.preparation else ())):
        if has_rule(node.operator):
            continue
        namespace, _, rest = node.operator.partition(".")
        packet = getattr(getattr(torch.ops, namespace), rest.partition(".")[0], None)
        if namespace != "aten" and packet is None:
            continue
        try:
            check_call(node, custom=(node.operator,))
            for _, argument in node.arguments:
                for token in _tokens(argument):
                    check_token(node, token)
        except PlanError as error:
            module = f" of module {node.module!r}" if node.module else ""
            raise UnsupportedError(f"node {node.name!r}{module}: {error}") from None


def _tokens(argument: Any) -> list[Token]:
    if isinstance(argument, tuple):
        return [token for item in argument for token in _tokens(item)]
    return [argument] if isinstance(argument, Token) else []
