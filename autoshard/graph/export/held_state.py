"""Parameters and buffers that plain objects hold as well, such as lists, or caches of models."""

from itertools import chain

from torch import nn

from autoshard.graph.export.captured import held_tensors


class HeldState:
    """The parameters and buffers of a model that plain objects hold as well.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = {
            id(tensor): (module, name)
            for module in model.modules()
            for name, tensor in chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            )
        }
        self._found = [
            (place, owners[id(place.value)])
            for _, place in held_tensors(model)
            if id(place.value) in owners and not isinstance(place.holder, tuple)
        ]

    @property
    def any(self) -> bool:
        """True if there is one."""
        return bool(self._found)

    def follow(self) -> None:
        """Give the objects the tensors that the modules have now."""
        for place, (owner, name) in self._found:
            place.holder[place.key] = getattr(owner, name)


def follow_state(model: nn.Module) -> None:
    """Make plain objects hold the parameters and buffers that a module has while it is traced.

    Tracing replaces those of modules by fake tensors, but not those in other objects; what forward
    reads or writes there would be lost.

    Args:
        model: a copy that is only traced; it gets a hook.
    """
    held = HeldState(model)
    if held.any:
        model.register_forward_pre_hook(lambda *_: held.follow())
