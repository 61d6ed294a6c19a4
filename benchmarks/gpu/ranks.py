"""Runs a function on ranks of this machine; as a program, tries whether two can share the GPU."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autoshard import Plan
from autoshard.launching import LaunchContext, join, own_gpu

Found = tuple[str, Mapping[str, Any]]
"""Name and value of a result."""


def on_ranks(
    function: Callable[..., Iterator[Found]],
    arguments: Sequence[Any],
    num_ranks: int,
    device: str,
) -> Iterator[Found]:
    """Run a function on ranks; yields what it yields on the first one.

    Ranks on CPUs are forks of this process; GPUs do not work in forks.

    Raises:
        RuntimeError: a rank failed; all others were ended.
    """
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    port = free_port()
    ranks = [
        context.Process(
            target=_rank, args=(rank_variables(i, num_ranks, port), function, arguments, sender)
        )
        for i in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    sender.close()
    try:
        yield from _received(receiver, ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _received(receiver: Connection, ranks: Sequence[Any]) -> Iterator[Found]:
    """What is received until all ranks have ended."""
    running = {rank.sentinel: number for number, rank in enumerate(ranks)}
    is_open = True
    while running or is_open:
        for ready in wait([*running, *([receiver] if is_open else [])]):
            if isinstance(ready, int):
                number = running.pop(ready)
                ranks[number].join()
                if ranks[number].exitcode:
                    raise RuntimeError(f"rank {number} ended with {ranks[number].exitcode}")
                continue
            try:
                yield receiver.recv()
            except EOFError:
                is_open = False


def _rank(
    variables: Mapping[str, str],
    function: Callable[..., Iterator[Found]],
    arguments: Sequence[Any],
    sender: Connection,
) -> None:
    os.environ.update(variables)
    for found in function(*arguments):
        if os.environ["RANK"] == "0":
            sender.send(found)
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Environment variables of a rank of this machine, as torchrun sets them."""
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if "AUTOSHARD_RANKS_AS_HOSTS" in os.environ:
        own["NCCL_HOSTID"] = str(rank)
    return own


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def join_as_one_rank(plan: Plan) -> LaunchContext:
    """The context of a plan for one device, in this process."""
    os.environ.update(rank_variables(0, 1, free_port()))
    return join(plan)


def _sums() -> Iterator[Found]:
    """Whether the ranks sum a tensor rightly."""
    device = own_gpu()
    dist.init_process_group("nccl")
    ones = torch.ones(1 << 20, device=device)
    dist.all_reduce(ones)
    yield "sum", {"is_right": bool((ones == dist.get_world_size()).all())}


if __name__ == "__main__":
    if not all(result["is_right"] for _, result in on_ranks(_sums, (), 2, "cuda")):
        raise SystemExit("ranks that share the GPU sum wrongly")
