"""Launching a function on the ranks of a plan, from Python."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autoshard.plan import Plan
from autoshard.runtime.launch.failures import failures_noted, first_failure
from autoshard.runtime.launch.launched import LaunchContext, check_world, join

T = TypeVar("T")


def launch(
    function: Callable[..., T], plan: Plan, args: Sequence[Any] = (), *, timing: bool = False
) -> list[T]:
    """Run a function on every rank of a plan, all of them on this machine.

    Args:
        function: called with a `LaunchContext` and the arguments, in a process of its own per rank;
            it must be defined at the top of a module.
        plan: what the ranks are for.
        args: sent to every rank, as `multiprocessing` does.
        timing: whether rank 0 prints how long each `LaunchContext.step` takes.

    Returns:
        What the function returned, by rank.

    Raises:
        PlanError: the document holds no plan.
        LaunchError: a rank failed; the message has its traceback.
    """
    check_world(plan, plan.mesh.num_devices)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.mesh.num_devices,
        run_id=str(uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    with TemporaryDirectory(prefix="autoshard-launch-") as folder:
        try:
            with _quiet():
                settings = _Settings(plan.to_json(), folder, timing)
                results = elastic_launch(config, _rank)(settings, function, tuple(args))
        except ChildFailedError as failed:
            raise first_failure(Path(folder), failed) from None
    return [results[rank] for rank in sorted(results)]


class _Settings(NamedTuple):
    """What every rank is told: the plan, where to note failures, and whether to time steps."""

    plan: str
    folder: str
    timing: bool


def _rank(settings: _Settings, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    with failures_noted(Path(settings.folder)):
        launched: LaunchContext = join(Plan.from_json(settings.plan), timing=settings.timing)
        result = function(launched, *args)
        launched.close()
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """The elastic launcher logs a failed rank with a traceback of its own; ours is enough."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
