"""Communication of weights that runs beside compute: how much of it nobody waits for.

A *weight* is a parameter, or what is made of one alone, transposed or cast. What moves it
waits for no activation: its gather can run ahead of its reader, beside the compute that comes
before, and the reduction of its gradient can go on beside the rest of backward. Both are
priced against the compute of the reader itself: forward communication hides under the
reader's forward; backward communication, and what runs forward once more in backward, under
its backward. What does not fit is left to wait for.

That is the steady state of a stack of layers that are alike, where the gather of one layer
runs beside the layer before it. In general: of readers 1..n with communication C and compute
W each, communication one after the other and as far ahead as it likes, the forward pass takes

    max over i of (C_1 + .. + C_i + W_i + .. + W_n)

(Johnson, "Optimal two- and three-stage production schedules with setup times included",
1954), and that is at most sum(max(C_i, W_i)) + max(min(C_i, W_i)). The price here is the
first of the two terms, so it is short of the truth by what a single reader hides at most:
the first gather has nothing to run beside. Backward is the same in a mirror; where weights
are gathered again there too, only for readers that are alike.

Everything else errs on the dear side:

* compute of operators without weights hides nothing, nor does what a checkpoint runs again;
* collectives of activations hide nothing and are not hidden, as if links that both use
  served one after the other; likewise all communication of one reader, on whatever axes;
* compute hides once: weights of one reader share it, in the ratio of the time that a whole
  all-reduce of each takes, and a resharding that several readers share hides nothing.

Two things are left out: that collectives slow the kernels beside them, and the memory of
what is gathered ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.graph import Graph, Node
from autoshard.mesh import Mesh
from autoshard.ops import weights_of

_HIDEABLE = 1 - 1e-6
"""Share of what fits under compute that costs nothing: of plans that take equal time, the
one that communicates less wins."""


Seconds = TypeVar("Seconds", float, FloatArray)


@dataclass(frozen=True, eq=False)
class ForwardBackward(Generic[Seconds]):
    """Seconds of something forward and backward; numbers, or arrays of one shape."""

    forward: Seconds
    backward: Seconds


def overlapped_seconds(
    communication: ForwardBackward[Seconds],
    compute: ForwardBackward[Seconds],
    *,
    again: bool = False,
) -> Seconds:
    """Seconds of communication that run beside compute.

    Args:
        communication: of a weight, for one reader.
        compute: of the reader, as far as it is this weight's share.
        again: whether the forward part runs once more in backward.
    """
    late = communication.backward + (communication.forward if again else 0.0)
    early: Seconds = np.minimum(communication.forward, compute.forward)
    hidden: Seconds = _HIDEABLE * (early + np.minimum(late, compute.backward))
    return hidden


class Overlap:
    """Which uses of a program's values are uses of weights, and their share of compute.

    Args:
        graph: the program.
        mesh: the devices.
    """

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self._graph = graph
        self._mesh = mesh
        self._weights = weights_of(graph)
        self._shares: dict[str, tuple[float, ...]] = {}

    def share(self, node: Node, position: int) -> float | None:
        """Share of a node's compute beside which an input can move; None if it is no weight.

        Those of all inputs of a node add up to 1, or to 0 if it reads no weight.
        """
        if node.name not in self._shares:
            self._shares[node.name] = self._shared(node.inputs)
        return self._shares[node.name][position] or None

    def _shared(self, inputs: Sequence[str]) -> tuple[float, ...]:
        seconds = [self._seconds(v) if v in self._weights else 0.0 for v in inputs]
        total = sum(seconds)
        return tuple(s / total if total else 0.0 for s in seconds)

    def _seconds(self, value: str) -> float:
        nbytes = self._graph.values[value].nbytes
        axes = range(len(self._mesh.axis_sizes))
        return sum(self._mesh.collective_time("all_reduce", axis, nbytes) for axis in axes)
