"""Transfers between stages: every receiver gets its whole shard, once, from a rank that has it."""

import random
from math import prod

import numpy as np
import pytest

from autoshard.errors import PlanError
from autoshard.layouts import Layout, legal_layouts
from autoshard.mesh import make_mesh
from autoshard.schedules.transfers import largest_load, messages, transfer_seconds

SHAPE = (8, 6, 4)


def shard(text: str, sizes: tuple[int, ...], rank: int) -> tuple[slice, ...]:
    coordinate = [int(x) for x in np.unravel_index(rank, sizes)]
    return tuple(part for (part,) in Layout.parse(text).local_slices(SHAPE, sizes, coordinate))


def random_layout(random_: random.Random, sizes: tuple[int, ...]) -> str:
    legal = legal_layouts(SHAPE, sizes, differentiable=True, partial=False)
    return str(random_.choice([x for x in legal if not any(t.sub_shards for t in x.types)]))


@pytest.mark.parametrize("seed", range(60))
def test_receivers_get_exactly_their_shards(seed: int) -> None:
    random_ = random.Random(seed)
    meshes = [(1,), (2,), (4,), (2, 2), (2, 3), (4, 2)]
    source_sizes, target_sizes = random_.choice(meshes), random_.choice(meshes)
    source = random_layout(random_, source_sizes)
    target = random_layout(random_, target_sizes)
    whole = np.arange(prod(SHAPE)).reshape(SHAPE)
    received = {r: np.full(SHAPE, -1) for r in range(prod(target_sizes))}
    for message in messages(SHAPE, source, source_sizes, target, target_sizes):
        own = shard(source, source_sizes, message.sender)
        sent = whole[own][message.within(own)]
        place = received[message.receiver][message.part]
        assert sent.shape == message.shape
        assert (place == -1).all()
        place[...] = sent
    for rank, tensor in received.items():
        own = shard(target, target_sizes, rank)
        assert (tensor[own] == whole[own]).all()
        assert (tensor >= 0).sum() == whole[own].size


def test_equal_meshes_and_layouts_send_to_the_counterpart() -> None:
    sent = messages(SHAPE, "S(0),I", (2, 2), "S(0),I", (2, 2))
    assert [(m.sender, m.receiver) for m in sent] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert largest_load(sent, itemsize=4) == 4 * prod(SHAPE) // 2


def test_a_replicated_tensor_is_sent_in_slices_to_ranks_that_want_slices() -> None:
    sent = messages(SHAPE, "I", (2,), "S(0)", (2,))
    assert [(m.sender, m.receiver, m.shape) for m in sent] == [(0, 0, (4, 6, 4)), (1, 1, (4, 6, 4))]


def test_partial_sums_are_not_sent() -> None:
    with pytest.raises(PlanError, match="cannot be sent between stages"):
        messages(SHAPE, "P", (2,), "I", (2,))


def test_transfers_between_nodes_are_slower_and_local_ones_free() -> None:
    mesh = make_mesh((2, 8), topology="h100-sxm")
    inside = transfer_seconds(mesh, range(4), range(4, 8), [1 << 20])
    between = transfer_seconds(mesh, range(8), range(8, 16), [1 << 20])
    assert 0 < inside < between
    assert transfer_seconds(mesh, range(8), range(8), [1 << 20]) == 0
