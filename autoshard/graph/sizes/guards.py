"""Conditions on dynamic sizes under which an export computes what the model does.

Where forward branches on a size (`if x.shape[0] % 2 == 0`), the export has the branch of the
example inputs, and a guard: a condition in Python's notation on the sizes of the arguments.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.errors import UnsupportedError
from autoshard.graph.json_fields import typed
from autoshard.graph.sizes.dynamic_sizes import MAX_CONDITIONS, Condition
from autoshard.graph.sizes.expressions import parsed, shortened, symbols_in

_FLAT = "flat_args"
"""The name that strict exports give to all arguments together."""
_OF_MEMORY = ("stride", "storage_offset")
"""Methods of tensors that say how they are stored, on which no plan depends."""


def read_conditions(model: Mapping[str, Any]) -> tuple[Condition, ...]:
    """Conditions of an export, without those on fixed sizes alone.

    Raises:
        UnsupportedError: a condition is not on sizes of arguments, or there are too many.
        GraphError: it cannot be parsed.
    """
    sizes = _Sizes(model)
    found: dict[str, Condition] = {}
    guards = typed(model.get("guards_code") or [], list, "'guards_code'")
    if len(guards) > MAX_CONDITIONS:
        raise UnsupportedError(f"there are {len(guards)} conditions on sizes")
    for guard in guards:
        text = typed(guard, str, "a guard")
        if any(f".{method}(" in text for method in _OF_MEMORY):
            continue
        expression = shortened(sizes.visit(ast.parse(ast.unparse(parsed(text)), mode="eval").body))
        if any(True for _ in symbols_in(expression)) and not _is_trivial(parsed(expression)):
            found.setdefault(expression, Condition(expression, _readable(text)))
    return tuple(found.values())


def _is_trivial(condition: ast.expr) -> bool:
    """True if two equal sizes must be equal, such as those of two arguments that share a size."""
    match condition:
        case ast.Compare(left, [ast.Eq()], [right]):
            return ast.unparse(left) == ast.unparse(right)
    return False


def _readable(guard: str) -> str:
    """A guard with names of arguments: `x.size()[0] > 5` for `L['x'].size()[0] > 5`."""
    return re.sub(r"\bL\['([^']+)'\]", r"\1", ast.unparse(parsed(guard)))


class _Sizes(ast.NodeTransformer):
    """Replaces sizes of arguments by their expressions.

    Args:
        model: the parsed model.json.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        module = model["graph_module"]
        specs = (spec.get("user_input") for spec in module["signature"]["input_specs"])
        arguments = [spec["arg"] for spec in specs if spec is not None]
        self._names = [argument.get("as_tensor", {}).get("name") for argument in arguments]
        self._tensors = module["graph"]["tensor_values"]

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        match node:
            case ast.Subscript(
                ast.Call(ast.Attribute(path, "size"), [], []), ast.Constant(int(dim))
            ):
                sizes = self._tensors[self._name(path)]["sizes"]
                if 0 <= dim < len(sizes):
                    return _as_expression(sizes[dim])
        raise UnsupportedError(f"the condition {ast.unparse(node)!r:.80} is not on a size")

    def _name(self, path: ast.expr) -> str:
        """Name of the program's input at a path of the arguments."""
        keys = list(_keys(path))
        name = re.sub(r"[^a-z0-9_]", "_", "_".join(map(str, keys)).lower())
        # Another argument of the same name gets a number.
        if name in self._names and f"{name}_1" not in self._names:
            return name
        match keys:
            case [str(first), int(position)] if first == _FLAT and position < len(self._names):
                if self._names[position] is not None:
                    return str(self._names[position])
        raise UnsupportedError(f"there is no argument {ast.unparse(path)!r:.80}")


def _keys(path: ast.expr) -> Iterator[str | int]:
    match path:
        case ast.Name("L"):
            return
        case ast.Subscript(inner, ast.Constant(str() | int() as key)):
            yield from _keys(inner)
            yield key
        case ast.Attribute(inner, key):
            yield from _keys(inner)
            yield key
        case _:
            raise UnsupportedError(f"{ast.unparse(path)!r:.80} is no argument")


def _as_expression(size: Mapping[str, Any]) -> ast.expr:
    if "as_int" in size:
        return ast.Constant(size["as_int"])
    return parsed(size["as_expr"]["expr_str"])
