"""Tensors sent between ranges of ranks of different sizes and layouts."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from support.devices import DEVICE

from autoshard.runtime.pipelining.routes import Route, TransferEnd, exchange
from autoshard.runtime.recorder import CONTENTS

SHAPE = (4, 6, 5)


@dataclass
class Sent:
    """Every receiving rank gets its shard, and the sending ranks get theirs back.

    Attributes:
        source: layout and sizes of the axes at one end.
        target: at the other end.
    """

    source: tuple[str, tuple[int, ...]]
    target: tuple[str, tuple[int, ...]]

    def __call__(self) -> None:
        whole = torch.arange(prod(SHAPE), device=DEVICE).view(SHAPE).float()
        size = prod(self.source[1])
        ends = [
            TransferEnd(tuple(range(size)), self.source[1], self.source[0]),
            TransferEnd(
                tuple(range(size, size + prod(self.target[1]))), self.target[1], self.target[0]
            ),
        ]
        rank, group = dist.get_rank(), dist.group.WORLD
        assert group is not None
        for one, other in (ends, ends[::-1]):
            route = Route.of(SHAPE, whole.dtype, one, other)
            have, want = one.shard(SHAPE, rank), other.shard(SHAPE, rank)
            given = None if have is None else whole[have]
            tag = CONTENTS.index("value")
            (found,) = exchange([given], [route], torch.device(DEVICE), group, tag)
            assert (found is None) == (want is None)
            if found is not None and want is not None:
                assert torch.equal(found, whole[want])


CASES: dict[str, Callable[[], None]] = {
    f"{source} {target}": Sent(source, target)
    for source, target in (
        (("S(0)", (2,)), ("S(1)", (2,))),
        (("I", (1,)), ("S(2)", (3,))),
        (("S(1)", (3,)), ("I", (1,))),
        (("S(0)", (2,)), ("I", (2,))),
        (("I", (2,)), ("S(0),S(1)", (1, 2))),
        (("S(1),S(1);1>0", (2, 1)), ("S(0)", (2,))),
    )
}
