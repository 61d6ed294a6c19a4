"""One call of an operator, with the shapes of what goes in and what comes out."""

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.errors import SchemaError
from autoshard.graph import Argument, CallRule, Graph, Node, Tensor, references
from autoshard.ops.rule import OperatorRule


@dataclass(frozen=True, slots=True)
class Call:
    """All that a rule may look at.

    Attributes:
        operator: namespace, packet and overload, as in `aten.add.Tensor`.
        arguments: schema name and value of each argument given, in schema order.
        inputs: the tensors used, in the order of `Node.inputs`.
        outputs: the tensors made.
        given: a rule that came with the graph; it counts where the library has none.
    """

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    given: CallRule | None = None

    def argument(self, name: str, default: Argument = None) -> Argument:
        """The argument of that schema name, or the default where it was left out."""
        return next((value for key, value in self.arguments if key == name), default)

    def positions(self, name: str) -> tuple[int, ...]:
        """Positions in `inputs` of the tensors in one argument; () where it has none."""
        first = 0
        for key, value in self.arguments:
            count = sum(1 for _ in references(value))
            if key == name:
                return tuple(range(first, first + count))
            first += count
        return ()

    def tensor(self, name: str) -> Tensor | None:
        """The tensor in an argument, or None where the argument is not a tensor."""
        positions = self.positions(name)
        return self.inputs[positions[0]] if positions else None

    @property
    def names(self) -> tuple[str, ...]:
        """Schema name of the argument that each input belongs to."""
        return tuple(key for key, value in self.arguments for _ in references(value))

    def integer(self, name: str, default: int) -> int:
        """An integer argument.

        Raises:
            SchemaError: it is something else.
        """
        value = self.argument(name, default)
        if not isinstance(value, int):
            raise SchemaError(f"{self.operator}: {name} is {value!r}, not an integer")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers; one integer counts as a list; () for None or left out."""
        value = self.argument(name)
        items = value if isinstance(value, tuple) else () if value is None else (value,)
        return tuple(item for item in items if isinstance(item, int))

    def number(self, name: str, default: float) -> float:
        """A number that is a literal.

        Raises:
            SchemaError: it is something else.
        """
        value = self.argument(name, default)
        if not isinstance(value, (int, float)):
            raise SchemaError(f"{self.operator}: {name} is {value!r}, not a number")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A flag."""
        return bool(self.argument(name, default))

    def dims(self, name: str) -> frozenset[int]:
        """Dims of the first input named by an integer or a list, counted from the front."""
        rank = max(len(self.inputs[0].shape), 1)
        return frozenset(dim % rank for dim in self.integers(name))

    def dim(self, name: str, default: int) -> int:
        """One dim of the first input, counted from the front; 0 for a scalar."""
        return self.integer(name, default) % max(len(self.inputs[0].shape), 1)


def call_of(graph: Graph, node: Node) -> Call:
    """The call that a node of a graph makes."""
    return Call(
        operator=node.operator,
        arguments=node.arguments,
        inputs=tuple(graph.values[name] for name in node.inputs),
        outputs=tuple(graph.values[name] for name in node.outputs),
        given=graph.rule_of(node),
    )


Rule = Callable[[Call], OperatorRule]
"""What a family registers for an operator."""
