"""The classes of models that run as planned: subclasses with the names of the former classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from autoshard.errors import CheckpointError
from autoshard.torch_private import not_compiled

ModelT = TypeVar("ModelT", bound=nn.Module)


def original_forward(model: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Forward of a model before a plan is applied, with the model as first argument."""
    if own is None:
        return type(model).forward
    if isinstance(own, MethodType):
        return own.__func__

    @wraps(own)
    def forward(_model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    first = Parameter("self", Parameter.POSITIONAL_ONLY)
    vars(forward)["__signature__"] = Signature([first, *signature(own).parameters.values()])
    return forward


def class_as_before(
    mixin: type, original: type[ModelT], replaced: Callable[..., Any]
) -> type[ModelT]:
    """A subclass of a model's class, and of a mixin class whose forward it has.

    Its names are those of the class, since libraries look models up by them: transformers tells by
    it whether labels are shifted, and writes it into checkpoints.

    Args:
        mixin: has `forward`.
        original: the class of the model.
        replaced: the function whose signature forward keeps, with the model as first argument.
    """

    @wraps(replaced)
    @not_compiled
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    members = {**named, "forward": forward, "planned_forward": forward}
    saves = getattr(original, "save_pretrained", None)
    if callable(saves):
        members["save_pretrained"] = _saved_whole(saves)
    made: type[ModelT] = type(original.__name__, (mixin, original), members)
    return made


def _saved_whole(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` of transformers or PEFT, of tensors that are passed."""

    @wraps(plain)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, Mapping) for x in (*args, kwargs.get("state_dict"))):
            raise CheckpointError(
                "save_pretrained of a planned model would save this rank's shards: call "
                "save_checkpoint(model, folder) on every rank and model.config.save_pretrained("
                "folder) on one, which from_pretrained reads; for adapters of PEFT, call "
                "autoshard.integrations.transformers.save_adapters(model, folder); or pass full "
                "tensors as state_dict"
            )
        return plain(self, *args, **kwargs)

    return save_pretrained


class NotPickled:
    """Mixin class of models that can be copied, but not pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce the model for `copy`; `pickle` gets an error."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, *rest = reduced
        return (_Copying(function), *rest)


@dataclass(frozen=True, slots=True)
class _Copying:
    """A function that makes the object of a copy; `copy` calls it, and `pickle` stores it."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Make the object."""
        return self.function(*args)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse to be stored.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            "a planned model cannot be pickled: it has this rank's shards, and the process groups "
            "of its mesh. Save its weights with save_checkpoint(model, folder), which any other "
            "plan and unsharded models load, or each rank's model.state_dict() in a file of its own"
        )
