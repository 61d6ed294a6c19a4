"""Exported archive -> immutable graph. Knows no torch, except to export."""

from autoshard.graph.ir import (
    Argument,
    DType,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    Ref,
    Tensor,
    Token,
    TokenKind,
    references,
)

__all__ = [
    "Argument",
    "DType",
    "Graph",
    "Input",
    "InputKind",
    "Node",
    "Output",
    "Ref",
    "Tensor",
    "Token",
    "TokenKind",
    "references",
]
