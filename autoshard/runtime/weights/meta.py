"""Models without memory for parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """A context in which models are made without memory for parameters, but with their buffers.

    Buffers that checkpoints do not hold (rotary tables, for one) are computed as the model is
    made; on the meta device their values would be lost. It acts on all models that are made
    meanwhile, in any thread.
    """
    # torch documents that the hook may return a parameter; its annotation says otherwise.
    hook: Any = _without_memory
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _without_memory(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:
        return None  # stays what it is, so that tied parameters stay one
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
