"""A parsed program as it arrived: operators and, nested in them, regions.

The one step between model.json and `Graph`, which has no nesting.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.graph.ir import Argument, Input, Node, Output, Tensor


@dataclass(frozen=True, slots=True)
class Body:
    """A list of steps with its own inputs and names.

    Attributes:
        inputs: names of the values that come in; None where a number comes in, which is
            already put in wherever it is used.
        steps: operators and regions in execution order.
        outputs: what goes out.
        values: shape and type of every value made or taken here.
    """

    inputs: tuple[str | None, ...]
    steps: tuple["Node | Region", ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Region:
    """A call of a higher-order operator: a body that runs under some setting.

    Attributes:
        name: unique among the steps of its body.
        operator: as in `higher_order.wrap_with_set_grad_enabled`.
        settings: arguments in front of the body.
        body: what runs.
        operands: arguments behind the body, one for each input of the body.
        outputs: names of the values made, one for each output of the body.
    """

    name: str
    operator: str
    settings: tuple[Argument, ...]
    body: Body
    operands: tuple[Argument, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A whole program; the inputs and outputs of its body are those of the model.

    Attributes:
        inputs: what comes in.
        body: what runs.
        in_spec: how the arguments nest.
        out_spec: how the results nest.
        has_open_sizes: whether sizes may be others than the numbers that stand for them.
    """

    inputs: tuple[Input, ...]
    body: Body
    in_spec: str = ""
    out_spec: str = ""
    has_open_sizes: bool = False
