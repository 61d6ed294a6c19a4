"""The values that a call of a module reads, and whether they are still there."""

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from torch import nn

from autoshard.graph.export.python_state.description.paths import (
    Path,
    PythonPlace,
    find_place,
    instance_dict,
    path_text,
)
from autoshard.graph.export.python_state.description.values import Value, describe
from autoshard.graph.export.python_state.recording.recorder import Recorder
from autoshard.graph.export.python_state.user_code.holders import MODULE_FIELDS, identity
from autoshard.graph.export.repetition.alike import (
    CONTAINERS,
    Correspondence,
    Part,
    is_fixed,
    is_plain,
    parts_of,
    same_plain,
)

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _ReadValue:
    """A value as it was.

    Attributes:
        value: the value.
        contents: its description, if it may change where it is.
    """

    value: Any
    contents: Value

    @classmethod
    def of(cls, value: Any) -> "_ReadValue":
        """Keep a value."""
        changes = isinstance(value, (*CONTAINERS, ContextVar))
        return cls(value, describe(value) if changes else None)

    def is_now(self, value: Any) -> bool:
        """True if a value is the same one, with the same contents."""
        if value is not self.value:
            return is_plain(value) and same_plain(value, self.value)
        return self.contents is None or describe(value) == self.contents


class Reads:
    """The attributes that a call reads, noted while it runs.

    Args:
        recorder: of the export.
        path: of the module that is called.

    Attributes:
        paths: of the attributes that were read.
        unsuited: why the call has to be traced; empty if nothing says so.
    """

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self.paths: set[Path] = set()
        self.unsuited = ""
        self._recorder, self._path = recorder, path
        self._read: dict[Part, tuple[Any, _ReadValue]] = {}
        self._all_of: set[int] = set()
        self._objects = [(x, _state_of(x)) for x in _objects(recorder)]
        self._new: list[Any] = []
        self._before = set(recorder.reads)
        self._outside: list[tuple[PythonPlace, _ReadValue]] = []
        self._recorded: frozenset[Path] = frozenset()

    def note(self, holder: Any, path: Path, name: str) -> None:
        """Note that an attribute is read; the holder is None if it is not known."""
        if holder is None:
            self.unsuited = f"it reads {name!r} of an object that forward makes"
            return
        if isinstance(holder, nn.Module) and name in MODULE_FIELDS:
            return
        if name == "__dict__":
            self._all_of.add(identity(holder))
            return
        self.paths.add((*path, name))
        if (identity(holder), name) in self._read:
            return
        place = find_place(holder, name)
        value = _ABSENT if place is None else place.value
        if place is not None and place.owner is None and not self._is_seen(value):
            if not self._recorder.changes.had((*path, name), value):
                self.unsuited = f"it reads {path_text((*path, name))}, which may change unseen"
            self._new.append(value)  # watched from now on
            self._objects.append((value, _state_of(value)))
        self._read[identity(holder), name] = holder, _ReadValue.of(value)

    def _is_seen(self, value: Any) -> bool:
        """True if a value, and what it holds, is watched or cannot change."""
        if is_fixed(value) or isinstance(value, np.ndarray):
            return True
        if isinstance(value, FunctionType):
            return self._recorder.holders.has_function(value)
        parts = parts_of(value)
        if parts is not None:
            return all(map(self._is_seen, parts))
        known = self._recorder.holders.find(value) is not None
        return known and (isinstance(value, nn.Module) or type(value) in self._recorder.watched)

    def end(self) -> None:
        """Note the end of the call."""
        recorder = self._recorder
        if any(before != _state_of(holder) for holder, before in self._objects):
            self.unsuited = "it changes an object"
        if not all(map(self._is_seen, self._new)):
            self.unsuited = "it reads an object that cannot be watched"
        if any(path[: len(self._path)] == self._path for path in recorder.unwatched):
            self.unsuited = "it has an object of a class that cannot be watched"
        self._outside = [(place, _ReadValue.of(place.value)) for place in _outside(recorder)]
        self._recorded = frozenset(
            path
            for path in recorder.reads
            if path[: len(self._path)] == self._path
            and (path not in self._before or path in self.paths)
        )

    @property
    def recorded(self) -> frozenset[Path]:
        """The paths inside of the module that the call has recorded."""
        return self._recorded

    def difference(self, alike: Correspondence) -> str:
        """The value that a call of another module would read otherwise; empty if there is none."""
        for number, name in alike.different:
            if (number, name) in self._read:
                return f"{name} is read, and is another one in each"
            if number in self._all_of:
                return f"all attributes are read, and {name} is another one in each"
        return self.changed()

    def changed(self) -> str:
        """The value that has changed since; empty if none has."""
        for (_, name), (holder, kept) in self._read.items():
            place = find_place(holder, name)
            if not kept.is_now(_ABSENT if place is None else place.value):
                return f"{name} has changed since"
        for place, kept in self._outside:
            now = place.now()
            if not kept.is_now(_ABSENT if now is None else now.value):
                return f"{place.key} has changed since"
        return ""


def _state_of(holder: Any) -> list[tuple[str, Any, Value]]:
    """The attributes of an object."""
    return [
        (name, id(value), describe(value) if isinstance(value, CONTAINERS) else None)
        for name, value in instance_dict(holder).items()
    ]


def _objects(recorder: Recorder) -> Iterator[Any]:
    """The known objects that are no modules."""
    return (holder for holder, _ in recorder.holders if not isinstance(holder, nn.Module))


def _outside(recorder: Recorder) -> Iterator[PythonPlace]:
    """The places of globals, of data of classes, and of free variables of functions."""
    for kept in recorder.changes.kept_outside():
        place = kept.now()
        if place is not None:
            yield place
