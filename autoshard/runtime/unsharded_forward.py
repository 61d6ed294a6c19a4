"""Calls whose tensors have other shapes than planned: every rank runs the unsharded forward.

The last batch of an epoch is often smaller than the others. A plan has no program for it, unless
the export left the batch size dynamic and the planned layouts can shard it.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from inspect import signature
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.graph import MixedPrecision
from autoshard.graph.export.casting import cast_parameter, with_casts
from autoshard.graph.export.replaced_tensors import call_with_tensors
from autoshard.runtime.checks.call_checks import compare_over_ranks
from autoshard.runtime.global_tensors.dtensors import full_tensor, store_full
from autoshard.runtime.signature import ShapeError
from autoshard.torch_private import default_store, note_uncompiled, pytree

MEETING_TIMEOUT = timedelta(minutes=10)
"""Time for which a rank waits for the others to call with tensors of other shapes too."""

_NUMBERS = count()


class UnshardedForward:
    """Runs the forward that the plan replaced, with full parameters and arguments.

    All ranks compute the same. Autograd keeps this rank's shard of the gradient of each parameter.
    Every rank needs the memory for all parameters and for the whole batch.

    Args:
        forward: of the model before the plan was applied, with the model as first argument.
        mesh: the devices.
        seed: of random operators.
        policy: the mixed precision of the plan; None if it has none.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        mesh: DeviceMesh,
        seed: int,
        policy: MixedPrecision | None = None,
    ) -> None:
        self._policy = policy or MixedPrecision()
        self._forward = forward
        if policy is not None:
            self._forward = with_casts(forward, policy)
        self._mesh = mesh
        self._seed = seed
        self._name = f"autoshard/unsharded/{next(_NUMBERS)}"  # alike on all ranks
        self._num_calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "UnshardedForward":
        """Return the object itself: it has no state of a model."""
        return self

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        step: int,
        why: ShapeError,
    ) -> Any:
        """Run one call.

        Args:
            model: the planned model.
            args: positional arguments, equal on all ranks.
            kwargs: keyword arguments, likewise.
            step: index of the step, for random numbers.
            why: the plan does not run.

        Raises:
            PlanError: ranks pass different arguments, or not all make the call.
            ShapeError: the model's own forward does not take the arguments.
        """
        if not self._takes(model, args, kwargs):
            raise why
        note_uncompiled()
        is_first = not self._num_calls
        self._meet(why)
        given = self._on_device(full_tensor((args, dict(kwargs))))
        bound = signature(self._forward).bind(model, *given[0], **given[1]).arguments
        leaves = ((name, x) for name, one in bound.items() for x in pytree.tree_leaves(one))
        tensors = [(name, x, "all") for name, x in leaves if isinstance(x, torch.Tensor)]
        if tensors:
            compare_over_ranks(tensors, self._mesh)
        if is_first:
            warnings.warn(
                f"{why.reason}. Such calls run the unsharded model on every rank, with all "
                f"parameters gathered; other_shapes='error', an argument of parallelize and "
                f"auto_parallelize, refuses them",
                stacklevel=4,
            )
        return self._run(model, *given, step=step)

    def _takes(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """False where an exported criterion takes further arguments."""
        try:
            signature(self._forward).bind(model, *args, **kwargs)
        except TypeError:
            return False
        return True

    def _meet(self, why: ShapeError) -> None:
        """Wait for all ranks: the collectives of one that runs the plan are other ones."""
        store = default_store()
        ranks = hashlib.blake2b(str(self._mesh.mesh.tolist()).encode(), digest_size=8).hexdigest()
        key = f"{self._name}/{ranks}/{self._num_calls}"
        self._num_calls += 1
        if store.add(key, 1) == self._mesh.size():
            store.set(f"{key}/all", "1")
        try:
            store.wait([f"{key}/all"], MEETING_TIMEOUT)
        except RuntimeError:
            raise PlanError(
                f"{why.reason}, but not on all ranks: pass the same global batch on all ranks, or "
                f"leave the last smaller batch out (drop_last=True)"
            ) from why

    def _on_device(self, given: Any) -> Any:
        device = torch.device(self._mesh.device_type)
        return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), given)

    def _run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, step: int
    ) -> Any:
        stored = chain(model.named_parameters(), model.named_buffers())
        sharded = {name: x for name, x in stored if isinstance(x, DTensor)}
        tensors: dict[str, torch.Tensor] = {
            name: cast_parameter(full_tensor(x), self._policy)
            if isinstance(x, nn.Parameter)
            else full_tensor(x)
            for name, x in sharded.items()
        }

        def store_buffers() -> None:
            with torch.no_grad():
                for name, x in sharded.items():
                    if not isinstance(x, nn.Parameter):
                        store_full(tensors[name], x)

        forward = partial(self._forward, model)
        with self._seeded(step):
            return call_with_tensors(model, forward, tensors, (args, kwargs), store_buffers)

    @contextmanager
    def _seeded(self, step: int) -> Iterator[None]:
        """Random numbers that all ranks draw alike."""
        is_cuda = self._mesh.device_type == "cuda"
        digest = hashlib.blake2b(f"{self._seed}/{step}/unsharded".encode(), digest_size=7).digest()
        with torch.random.fork_rng([torch.cuda.current_device()] if is_cuda else []):
            torch.manual_seed(int.from_bytes(digest))
            yield
