"""The record of an export: what forward read, as JSON."""

from collections.abc import Collection

from torch import nn

from autoshard.graph.export.python_state.description.folding import fold
from autoshard.graph.export.python_state.description.paths import (
    CALLED,
    CHILDREN,
    HOOKS,
    Path,
    path_text,
)
from autoshard.graph.export.python_state.description.values import Value
from autoshard.graph.export.python_state.description.wording import is_ignored
from autoshard.graph.export.python_state.modes.effects import Effects
from autoshard.graph.export.python_state.recording.changes import StateChange
from autoshard.graph.export.python_state.recording.recorder import Recorder

_NOT_COMPARED = ("random", "iterator")
"""Kinds of values that only forward itself could change in a way that matters."""


def record_of(
    recorder: Recorder, model: nn.Module, what: str, ignored: Collection[str]
) -> dict[str, Value]:
    """The values that forward read, after an export.

    Args:
        recorder: of the export.
        model: that was traced.
        what: its name.
        ignored: patterns of what is not compared.

    Raises:
        ExportError: forward changes what it reads, draws random numbers of Python, or reads a
            clock.
    """
    if not recorder.reads or not recorder.is_complete:
        return {}  # the model was not traced, or by a compiler
    effects, changes = Effects(recorder, model), recorder.changes
    found = [change for change in changes.found if not is_ignored(change.path, ignored)]
    if found and not (changes.is_lazy and effects.is_settled()):
        changes.check(what, ignored)
    sources = [path for path in recorder.sources() if not is_ignored(path, ignored)]
    if sources and not effects.is_repeatable():
        changes.found += [StateChange(path, None, None) for path in sources]
        changes.check(what, ignored)
    traced = set(recorder.reads)
    effects.add()
    _add_repeated(recorder, traced)
    recorder.finish()
    for change in found:
        if change.path in recorder.reads:
            recorder.reads[change.path] = {"either": [change.before, change.after]}
    return fold(
        {
            path_text(path): value
            for path, value in recorder.reads.items()
            if not is_ignored(path, ignored) and not _is_kind(value, _NOT_COMPARED)
        }
    )


def _add_repeated(recorder: Recorder, traced: Collection[Path]) -> None:
    """Add what calls that were left out would have read.

    Args:
        recorder: of the export.
        traced: what was read while the model was traced, without what was found afterwards.
    """
    reads = recorder.reads
    for first, path, recorded in recorder.repeated:
        for read in [x for x in reads if x[: len(first)] == first]:
            if read in recorded or read not in traced:
                other = (*path, *read[len(first) :])
                is_own = read == first or read[-1] in (CALLED, CHILDREN, *HOOKS)
                reads.setdefault(other, reads[read] if is_own else recorder.described_at(other))


def _is_kind(value: Value, kinds: Collection[str]) -> bool:
    return isinstance(value, dict) and not value.keys().isdisjoint(kinds)
