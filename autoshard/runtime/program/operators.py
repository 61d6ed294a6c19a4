"""Calls of a graph's operators with local tensors.

The overload, constant arguments and the positions of tensor arguments are resolved once.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.graph import Argument, Node, Ref, Token, TokenKind, references
from autoshard.ops.calls import check_token, resolve_operator
from autoshard.ops.rules.schema_checks import check_against_schema
from autoshard.runtime.program.local_node import Step
from autoshard.torch_private import schema_of


@dataclass(frozen=True, slots=True)
class _Input:
    """Placeholder of a tensor input in an argument."""

    position: int


class OperatorCall:
    """A call of an operator with all arguments bound except the tensors.

    Args:
        node: the call in the graph.
        device: device of the tensors that the operator creates.
        replaced: arguments that differ from those in the graph.
        custom: names of operators outside ATen that may be called.

    Raises:
        PlanError: plans may not call the operator, or an argument does not fit its schema.
    """

    def __init__(
        self,
        node: Node,
        device: torch.device,
        *,
        replaced: Mapping[str, Argument] | None = None,
        custom: Collection[str] = (),
    ) -> None:
        self._name, self._num_outputs = node.name, len(node.outputs)
        self._operator = resolve_operator(node.operator, custom=custom)
        schema = schema_of(self._operator)
        check_against_schema(node, schema, replaced)
        templates = _templates({**dict(node.arguments), **(replaced or {})}, device, node)
        args: list[Any] = []
        for argument in schema.arguments:
            if argument.name not in templates or argument.kwarg_only:
                break
            args.append(templates.pop(argument.name))
        self._args, self._kwargs = args, templates
        # Arguments that contain tensors; most are a tensor by itself.
        self._positions = [(i, x.position) for i, x in enumerate(args) if isinstance(x, _Input)]
        self._lists = [(i, x) for i, x in enumerate(args) if isinstance(x, tuple)]
        self._named = [(n, x) for n, x in templates.items() if isinstance(x, (_Input, tuple))]

    def __call__(
        self, tensors: Sequence[torch.Tensor], _step: Step = 0
    ) -> tuple[torch.Tensor, ...]:
        """Run on tensor inputs in the order of `Node.inputs`; lists of results are flattened.

        The step is ignored; it makes this class a `LocalKernel`.
        """
        args, kwargs = self._args.copy(), self._kwargs
        for index, position in self._positions:
            args[index] = tensors[position]
        for index, template in self._lists:
            args[index] = _fill(template, tensors)
        if self._named:
            kwargs = {**kwargs, **{name: _fill(x, tensors) for name, x in self._named}}
        made = self._operator(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return (made,)
        outputs = tuple(flat_results(made))
        # Some operators, such as unbind, have as many outputs as a dim has elements.
        assert len(outputs) == self._num_outputs, self._name
        return outputs


def _templates(
    arguments: Mapping[str, Argument], device: torch.device, node: Node
) -> dict[str, Any]:
    positions = iter(range(len(node.inputs)))
    return {
        name: _template(argument, positions, device, node) for name, argument in arguments.items()
    }


def _template(
    argument: Argument, positions: Iterator[int], device: torch.device, node: Node
) -> Any:
    """An argument with placeholders for tensors; a list with placeholders becomes a tuple."""
    if isinstance(argument, Ref):
        return _Input(next(positions))
    if isinstance(argument, Token):
        return token_object(argument, device, node)
    if isinstance(argument, tuple):
        items = [_template(item, positions, device, node) for item in argument]
        return tuple(items) if any(True for _ in references(argument)) else items
    return argument


def token_object(token: Token, device: torch.device, node: Node) -> object:
    """The torch object of a token; any device becomes this rank's device."""
    check_token(node, token)
    return device if token.kind is TokenKind.DEVICE else getattr(torch, token.value)


def _fill(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(template, _Input):
        return tensors[template.position]
    if isinstance(template, tuple):
        return [_fill(item, tensors) for item in template]
    return template


def flat_results(result: Any) -> list[torch.Tensor]:
    """The tensors that an operator returns, in lists or not."""
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in flat_results(item)]
    return [result]
