"""A torch that does something else than the library relies on is an error, on all ranks."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runtime.cases.misuse import Misuse, Net, assert_same
from runtime.cases.updated_buffers import MESHES
from support.comparison import device_mesh

from autoshard.errors import AutoshardError, PlanError, TorchVersionError
from autoshard.runtime import parallelize, torch_check
from autoshard.torch_private import checks, operator_handlers

ATEN = torch.ops.aten
VERSIONS = r"install one of the versions that work, 2\.\d+ to 2\.\d+"


@contextmanager
def unchecked() -> Iterator[None]:
    """The mesh is checked again inside of the context, and after it."""
    caches = (torch_check.prepare_torch, torch_check.prepare_pipelines)
    for function in caches:
        function.cache_clear()
    try:
        yield
    finally:
        for function in caches:
            function.cache_clear()


@contextmanager
def without_handlers(operators: Sequence[Any]) -> Iterator[None]:
    """DTensor does not call the handlers of some operators."""
    handlers = operator_handlers()
    kept = {operator: handlers.pop(operator) for operator in operators}
    with mock.patch.object(torch_check, "install_dtensor_handlers"), unchecked():
        try:
            yield
        finally:
            handlers.update(kept)


def refuses(case: "Broken", expected: type[AutoshardError], message: str) -> None:
    """The error is that of a model that is not changed."""
    model = Net()
    with pytest.raises(expected, match=message):
        parallelize(model, case.plan, device_mesh(case.plan))
    assert type(model) is Net


@dataclass
class Broken(Misuse):
    """Operators of which the handlers are not called, and what the error says of it.

    Attributes:
        operators: the operators.
        part: the part that the error names.
    """

    operators: Sequence[Any] = ()
    part: str = ""

    def __call__(self) -> None:
        torch_check.prepare_torch(device_mesh(self.plan))
        with without_handlers(self.operators):
            expected = rf"PyTorch {re.escape(torch.__version__)} .*{self.part}.*{VERSIONS}"
            refuses(self, TorchVersionError, expected)
        super().__call__()


class Overridden(Broken):
    """With the environment variable, the error is a warning, and the model runs."""

    def __call__(self) -> None:
        torch_check.prepare_torch(device_mesh(self.plan))
        reference = Net()
        with (
            without_handlers(self.operators),
            mock.patch.dict("os.environ", AUTOSHARD_ANY_TORCH="1"),
            pytest.warns(UserWarning, match=rf"{self.part}.*AUTOSHARD_ANY_TORCH=1 lets it run"),
        ):
            planned = parallelize(deepcopy(reference), self.plan, device_mesh(self.plan))
        assert_same(planned, reference)


class OnOneRank(Broken):
    """A part that is broken on one rank is an error on all, and no rank waits."""

    def __call__(self) -> None:
        if dist.get_rank() == 1:
            with mock.patch.object(checks, "is_transformed", return_value=False), unchecked():
                refuses(self, TorchVersionError, r"transforms of torch\.func are seen")
        else:
            with unchecked():
                refuses(self, PlanError, "rank 1 failed")


class OtherVersion(Broken):
    """Ranks with another version than the others are an error on all ranks."""

    def __call__(self) -> None:
        number = "2.13.7" if dist.get_rank() == 2 else torch.__version__
        with mock.patch.object(torch, "__version__", number), unchecked():
            message = rf"different versions of PyTorch, and this one has {re.escape(number)}"
            refuses(self, TorchVersionError, message)


class InOtherModes(Broken):
    """A plan may be applied where operators do something else than by default."""

    def __call__(self) -> None:
        mesh = device_mesh(self.plan)
        contexts: Sequence[Any] = (
            torch.no_grad(),
            torch.inference_mode(),
            torch.device("meta"),
            mock.patch.object(checks, "clip_grad_norm_", warning(checks.clip_grad_norm_)),
        )
        for context in contexts:
            with unchecked(), context:
                torch_check.prepare_pipelines(mesh)
        torch.set_default_dtype(torch.float64)
        try:
            with unchecked():
                torch_check.prepare_torch(mesh)
        finally:
            torch.set_default_dtype(torch.float32)


def warning(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is said to be deprecated."""

    def warns(*args: Any) -> Any:
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return function(*args)

    return warns


class Schedules(Broken):
    """Schedules that set stages up by themselves are an error before a pipeline is made."""

    def __call__(self) -> None:
        mesh = device_mesh(self.plan)
        with mock.patch.object(checks, "without_set_up", lambda schedule: schedule), unchecked():
            for _ in range(2):
                with pytest.raises(TorchVersionError, match=rf"schedules run stages.*{VERSIONS}"):
                    torch_check.prepare_pipelines(mesh)
        torch_check.prepare_pipelines(mesh)


ASSIGNMENTS = "assignments to parts of a DTensor are operators with a handler"
WRITES = (ATEN.fill_.Scalar, ATEN.fill_.Tensor, ATEN.copy_.default)

CASES: dict[str, Callable[[], None]] = {
    f"{name}, {mesh}": case
    for mesh, axes in MESHES.items()
    for name, case in {
        "writes": Broken(axes, assert_same, operators=WRITES, part=ASSIGNMENTS),
        "numbers": Broken(
            axes,
            assert_same,
            operators=(ATEN._local_scalar_dense.default,),
            part="the number of a DTensor is that of all ranks",
        ),
        "scaled gradients": Broken(
            axes,
            assert_same,
            operators=(ATEN._amp_foreach_non_finite_check_and_unscale_.default,),
            part="GradScaler sees infinite gradients of all ranks",
        ),
        "the override": Overridden(axes, assert_same, operators=WRITES, part=ASSIGNMENTS),
        "on one rank": OnOneRank(axes, assert_same),
        "of other versions": OtherVersion(axes, assert_same),
        "other modes": InOtherModes(axes, assert_same),
        "schedules": Schedules(axes, assert_same),
    }.items()
}
