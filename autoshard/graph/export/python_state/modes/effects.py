"""Modes that make a difference: a module that reads some is run in each combination of them.

A module may read `self.training` for dropout with a probability of zero, or for a fast path. So it
runs alone, on tensors without memory, with the arguments that it had in the export. What it does is
the sequence of its operators, of its calls of other modules, and its results, with all arguments.
Where that is the same in all combinations, the modes make no difference; nor do those of the
modules inside because of them, which are called alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import nn

from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    MODE,
    Path,
    instance_dict,
    path_text,
)
from autoshard.graph.export.python_state.description.queries import CONTEXTS, QUERIES
from autoshard.graph.export.python_state.description.values import Value, describe
from autoshard.graph.export.python_state.modes.events import Events, events_of_call
from autoshard.graph.export.python_state.recording.calls import ModuleCall
from autoshard.graph.export.python_state.recording.recorder import ModeReads, Recorder

_MOST_MODES = 3
"""Maximum number of modes of a module of which all combinations are tried: each doubles their
number. A module with more depends on all of them."""

_HERE = "."
"""First part of paths that begin at the module that is run."""

Reads = Mapping[Path, Value]


@dataclass(frozen=True)
class _ModeQuestion:
    """The question that a result answers; paths begin at the module.

    Attributes:
        kind: class of the module.
        call: its arguments.
        modes: that it reads.
        reads: the values that it and the modules inside read in the export.
        tensors: their parameters and buffers.
    """

    kind: type
    call: ModuleCall
    modes: frozenset[Path]
    reads: Reads
    tensors: Sequence[object]


@dataclass(frozen=True)
class _ModeAnswer:
    """A result.

    Attributes:
        with_effect: the modes that make a difference.
        reads: the values that are read in other modes only.
    """

    with_effect: frozenset[Path]
    reads: Reads


class Effects:
    """Finds the modes that make a difference in a recorded export.

    Args:
        recorder: of the export.
        model: that was traced.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder, self._model = recorder, model
        self._known: list[tuple[_ModeQuestion, _ModeAnswer]] = []

    def add(self) -> None:
        """Add the modes that make a difference to what was read.

        Where none of a module does, what it reads in other modes is added: with other values, the
        modes could make a difference.
        """
        for path, reads in tuple(self._recorder.modes.items()):
            for mode in self._of_module(path, reads):
                self._recorder.reads[mode] = describe(self._value(mode))

    def is_settled(self) -> bool:
        """True if a second call changes nothing more, and does what the first one did."""
        calls = self._two_calls()
        return calls is not None and calls[0][:-1] == calls[1][:-1] and not calls[1][-1]

    def is_repeatable(self) -> bool:
        """True if a second call does what the first one did."""
        calls = self._two_calls()
        return calls is not None and calls[0][:-1] == calls[1][:-1]

    def _two_calls(self) -> tuple[Events, Events] | None:
        """The events of two calls, one after the other; None if one fails."""
        changes = self._recorder.changes
        with self._recorder.replaying(()):
            first = self._events(self._model, self._recorder.call, {})
        with changes.applied(), self._recorder.replaying(()):
            second = self._events(self._model, self._recorder.call, {})
        return None if first is None or second is None else (first, second)

    def _of_module(self, path: Path, reads: ModeReads) -> set[Path]:
        modes = {mode for mode in reads.modes if mode[-1] == MODE or mode in CONTEXTS}
        found = reads.modes - modes
        module = self._model.get_submodule(path_text(path))
        for call in tuple(reads.calls):
            question = _ModeQuestion(
                kind=type(module),
                call=call,
                modes=frozenset(_relative(mode, path) for mode in modes),
                reads={
                    (_HERE, *name[len(path) :]): value
                    for name, value in self._recorder.reads.items()
                    if name[: len(path)] == path
                },
                tensors=[
                    (name, x.shape, x.dtype, x.requires_grad)
                    for tensors in (module.named_parameters(), module.named_buffers())
                    for name, x in tensors
                ],
            )
            answer = self._known_answer(question, path)
            if answer is None:
                answer = self._answer(module, path, call, modes)
                self._known.append((question, answer))
            found |= {_absolute(mode, path) for mode in answer.with_effect}
            for name, value in answer.reads.items():
                self._recorder.reads.setdefault(_absolute(name, path), value)
        return found

    def _known_answer(self, question: _ModeQuestion, path: Path) -> _ModeAnswer | None:
        """The result for a module that is alike, also in what it reads in other modes."""
        for known, answer in self._known:
            if known == question and all(
                self._recorder.described_at(_absolute(name, path)) == value
                for name, value in answer.reads.items()
                if name[-1] != CALLED
            ):
                return answer
        return None

    def _answer(
        self, module: nn.Module, path: Path, call: ModuleCall, modes: set[Path]
    ) -> _ModeAnswer:
        before = self._recorder.state()
        events: list[Events | None] = []
        while len(modes) <= _MOST_MODES:
            ordered = sorted(modes, key=path_text)
            events, read = [], set[Path]()
            for values in product((False, True), repeat=len(ordered)):
                with self._recorder.replaying(path) as replayed:
                    events.append(
                        self._events(module, call, dict(zip(ordered, values, strict=True)))
                    )
                read |= replayed.modes
            if read <= modes:
                break
            modes = modes | read  # some are read in other modes only
        is_known = len(modes) <= _MOST_MODES
        found = _differing(ordered, events) if is_known else frozenset(modes)
        if found == modes:
            self._recorder.restore(before)
        extra = {n: x for n, x in self._recorder.reads.items() if n not in before.reads}
        return _ModeAnswer(
            frozenset(_relative(mode, path) for mode in found),
            {_relative(name, path): value for name, value in extra.items()},
        )

    def _events(
        self, module: nn.Module, call: ModuleCall, modes: Mapping[Path, bool]
    ) -> Events | None:
        """The events of the module in some modes; None if it fails."""
        owners = {
            mode: instance_dict(self._model.get_submodule(path_text(mode[:-1])))
            for mode in modes
            if mode not in CONTEXTS
        }
        before = {mode: own[MODE] for mode, own in owners.items()}
        contexts = {mode: value for mode, value in modes.items() if mode in CONTEXTS}
        try:
            for mode, own in owners.items():
                own[MODE] = modes[mode]
            return events_of_call(self._recorder, module, call, contexts)
        except Exception:  # noqa: BLE001  forward may raise anything
            return None
        finally:
            for mode, own in owners.items():
                own[MODE] = before[mode]

    def _value(self, mode: Path) -> object:
        if mode in QUERIES:
            return QUERIES[mode]()
        return instance_dict(self._model.get_submodule(path_text(mode[:-1])))[MODE]


def _differing(modes: Sequence[Path], events: Sequence[Events | None]) -> frozenset[Path]:
    """The modes that change what happens, for events in the order of `product`."""
    if any(one is None for one in events):
        return frozenset(modes)
    found = set()
    for number, mode in enumerate(modes):
        bit = 1 << (len(modes) - 1 - number)
        if any(events[i] != events[i | bit] for i in range(len(events)) if not i & bit):
            found.add(mode)
    return frozenset(found)


def _relative(path: Path, base: Path) -> Path:
    return (_HERE, *path[len(base) :]) if path[: len(base)] == base else path


def _absolute(path: Path, base: Path) -> Path:
    return (*base, *path[1:]) if path[:1] == (_HERE,) else path
