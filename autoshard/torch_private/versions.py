"""The versions of PyTorch that work, and the error for those that do not."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from autoshard.errors import TorchVersionError

OLDEST, NEWEST = (2, 13), (2, 15)
"""The first and the last version that all tests have passed with."""

ANY_TORCH = "AUTOSHARD_ANY_TORCH"
"""The environment variable that turns refusals into warnings if it is 1."""

Check = Callable[[], bool]
"""Runs a private part; false, or an error, if it does not do what the library relies on."""


@contextmanager
def expected_of_torch(what: str) -> Iterator[None]:
    """A context for imports of what torch has in private modules.

    Args:
        what: is imported, for the message.

    Raises:
        TorchVersionError: the installed torch does not have it.
    """
    try:
        yield
    except ImportError as error:
        raise TorchVersionError(f"{_lacks([f'{what} ({error})'])}: {_remedy()}") from error


def check_parts(checks: Mapping[str, Check]) -> None:
    """Check that the installed torch does what the library relies on.

    Args:
        checks: by what they check, for the message.

    Raises:
        TorchVersionError: a check fails, or the version is too old; a warning where the environment
            variable AUTOSHARD_ANY_TORCH is 1.
    """
    installed = _installed()
    with _usual_modes():
        failed = [text for what, check in checks.items() if (text := _failure(what, check))]
    if failed:
        _refuse(_lacks(failed))
    elif installed < OLDEST:
        _refuse(f"PyTorch {torch.__version__} is too old for autoshard")
    elif installed > NEWEST:
        warnings.warn(
            f"PyTorch {torch.__version__} is newer than all that autoshard was tested with "
            f"({_working()}); what it relies on was checked and is there",
            stacklevel=2,
        )


def untested() -> str:
    """Say that the installed torch is none that tests have passed with; empty if it is one.

    For private parts that only make something faster: what a check cannot show need not be risked.
    """
    if OLDEST <= _installed() <= NEWEST:
        return ""
    return f"PyTorch {torch.__version__} is none of the versions that were tested ({_working()})"


def _installed() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


@contextmanager
def _usual_modes() -> Iterator[None]:
    """A context in which operators run as by default, in whatever context a plan is applied.

    Relies on: `_pop_mode_temporarily`, by which `TorchFunctionMode` itself leaves out modes, such
    as `torch.device`. The public ways would also leave out the functions of subclasses.
    """
    with expected_of_torch("modes of functions"):
        from torch.overrides import (  # noqa: PLC0415  the error needs what is defined above
            _get_current_function_mode_stack,
            _pop_mode_temporarily,
        )
    with ExitStack() as stack:
        while _get_current_function_mode_stack():  # type: ignore[no-untyped-call]  # torch
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        yield


def _failure(what: str, check: Check) -> str:
    """The check that does not hold, and why; empty if it does."""
    try:
        return "" if check() else what
    except Exception as error:  # noqa: BLE001  what another torch raises is not known
        return f"{what} ({type(error).__name__}: {error})"


def _refuse(reason: str) -> None:
    if os.environ.get(ANY_TORCH) == "1":
        warnings.warn(f"{reason}; {ANY_TORCH}=1 lets it run all the same", stacklevel=3)
        return
    raise TorchVersionError(f"{reason}: {_remedy()}. To try it all the same, set {ANY_TORCH}=1")


def _lacks(parts: list[str]) -> str:
    return (
        f"PyTorch {torch.__version__} does not do what autoshard relies on, so that numbers could "
        f"be wrong without an error ({'; '.join(parts)})"
    )


def _remedy() -> str:
    return f"install one of the versions that work, {_working()}"


def _working() -> str:
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
