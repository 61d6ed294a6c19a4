"""Overlap of the communication of weights with compute.

A *weight* is a parameter, or a value computed from a single parameter, such as its transpose or
cast. Its communication does not depend on activations: its gather can be prefetched during earlier
compute, and the reduction of its gradient can run during the rest of backward. Both are compared
with the compute of the weight's reader: forward communication overlaps with the forward of the
reader; backward communication, including a re-gather, overlaps with its backward. The remainder is
exposed.

This models the steady state of a stack of equal layers, where the gather of one layer overlaps with
the previous layer. In general, for readers 1..n with communication C_i and compute W_i, sequential
communication and unlimited prefetching, the forward pass takes

    max over i of (C_1 + .. + C_i + W_i + .. + W_n)

(Johnson, "Optimal two- and three-stage production schedules with setup times included",
1954), which is at most sum(max(C_i, W_i)) + max(min(C_i, W_i)). The price used here is the first
term, so it underestimates the time by at most the overlap of one reader, since the first gather
cannot be prefetched. Backward is symmetric; with re-gathers, only if readers are equal.

All other simplifications overestimate the time:

* compute of operators without weights, and recomputation of checkpoints, overlaps with nothing; *
collectives of activations are never overlapped, and neither do they overlap with those of weights;
  all communication of one reader, on any axes, is sequential;
* weights of one reader share its compute, in proportion to the time of an all-reduce of each; a
  resharding that several readers share does not overlap.

Collectives slow down concurrent kernels (`KernelRates.contention`). One effect is ignored:
prefetched weights use memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.graph import Graph, Node
from autoshard.mesh import Mesh
from autoshard.ops import weights_of

_FREE_FRACTION = 1 - 1e-6
"""Fraction of overlapped communication that is free; the rest breaks ties in favour of plans with
less communication."""


Seconds = TypeVar("Seconds", float, FloatArray)


@dataclass(frozen=True, eq=False)
class ForwardBackward(Generic[Seconds]):
    """Seconds in forward and in backward; floats, or arrays of the same shape."""

    forward: Seconds
    backward: Seconds


def overlapped_seconds(
    communication: ForwardBackward[Seconds],
    compute: ForwardBackward[Seconds],
    *,
    again: bool = False,
    contention: float = 0.0,
) -> Seconds:
    """Seconds that the overlap of communication with compute saves.

    Args:
        communication: communication of a weight for one reader.
        compute: the weight's share of the reader's compute.
        again: True if the forward part runs again in backward.
        contention: fraction of the overlapped seconds by which compute takes longer.
    """
    late = communication.backward + (communication.forward if again else 0.0)
    early: Seconds = np.minimum(communication.forward, compute.forward)
    hidden: Seconds = (_FREE_FRACTION - contention) * (early + np.minimum(late, compute.backward))
    return hidden


class Overlap:
    """Uses of weights in a program, and their share of the reader's compute.

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
        """Share of a node's compute that overlaps with an input; None if it is not a weight.

        The shares of all inputs of a node add up to 1, or to 0 if it reads no weight.
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
