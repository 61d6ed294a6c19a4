"""Which tensor of a checkpoint belongs to which of a model."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoshard.errors import CheckpointError
from autoshard.runtime.parameters import first_of
from autoshard.runtime.weights.slots import Slot
from autoshard.runtime.weights.source import Entry

NUM_DIFFERENCES = 10
"""How many differences between model and checkpoint an error names."""


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the model, and what the checkpoint has for it.

    Attributes:
        slot: of the model.
        names: in the checkpoint; several where it holds tied tensors under each name.
    """

    slot: Slot
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """How the names of a model and of a checkpoint go together.

    Attributes:
        rename: the name in the checkpoint of a name in the model.
        optional: patterns of names in the model that the checkpoint may lack.
        ignored: patterns of names in the checkpoint that the model may lack.
        cast: whether dtypes may differ.
    """

    rename: Callable[[str], str]
    optional: Collection[str]
    ignored: Collection[str]
    cast: bool

    def match(self, slots: Sequence[Slot], entries: Mapping[str, Entry]) -> list[Match]:
        """What to read; tensors that may be lacking and are, are left out.

        Raises:
            CheckpointError: model and checkpoint differ; the message names the differences.
        """
        found = [self._match(slot, entries) for slot in slots]
        differences = [
            *(difference for match in found for difference in self._differences(match, entries)),
            *self._unexpected(slots, entries),
        ]
        if differences:
            shown = first_of(differences, NUM_DIFFERENCES)
            raise CheckpointError(
                f"the checkpoint does not fit the model: {shown}{_hint(slots, entries)}"
            )
        return [match for match in found if match.names]

    def _match(self, slot: Slot, entries: Mapping[str, Entry]) -> Match:
        names = dict.fromkeys(self.rename(name) for name in slot.names)
        return Match(slot, tuple(name for name in names if name in entries))

    def _differences(self, match: Match, entries: Mapping[str, Entry]) -> Iterator[str]:
        slot = match.slot
        if not match.names:
            wanted = " or ".join(dict.fromkeys(repr(self.rename(name)) for name in slot.names))
            if not _any_matches(slot.names, self.optional):
                yield f"it lacks {wanted}"
            elif slot.is_meta:
                yield f"it lacks {wanted}, which has no values in the model either"
        for name in match.names:
            entry = entries[name]
            if entry.shape != tuple(slot.tensor.shape):
                yield (
                    f"{name!r} has shape {entry.shape}, and {tuple(slot.tensor.shape)} in the model"
                )
            elif entry.dtype != slot.tensor.dtype and not self.cast:
                yield (
                    f"{name!r} is {entry.dtype}, and {slot.tensor.dtype} in the model (cast=True "
                    f"converts it)"
                )

    def _unexpected(self, slots: Sequence[Slot], entries: Mapping[str, Entry]) -> Iterator[str]:
        known = {self.rename(name) for slot in slots for name in slot.names}
        for name in entries:
            if name not in known and not _any_matches([name], self.ignored):
                yield f"the model has no {name!r}"


def _any_matches(names: Iterable[str], patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _hint(slots: Sequence[Slot], entries: Mapping[str, Entry]) -> str:
    """How names would go together that differ in a prefix only."""
    name = slots[0].names[0] if slots else ""
    for other in entries:
        if name != other and other.endswith(f".{name}"):
            return f" (would rename={other.removesuffix(name)!r}.__add__ help?)"
        if name != other and name.endswith(f".{other}"):
            prefix = name.removesuffix(other)
            return f" (would rename=lambda name: name.removeprefix({prefix!r}) help?)"
    return ""
