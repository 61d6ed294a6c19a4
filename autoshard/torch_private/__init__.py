"""Private parts of PyTorch that the library relies on, each with what it relies on."""

from typing import TYPE_CHECKING

from autoshard.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.torch_private.pipelining import StageBase, num_micro_batches, without_set_up
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = ["StageBase", "num_micro_batches", "without_set_up"]
