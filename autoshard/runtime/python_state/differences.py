"""Differences from the export, and messages that say what to do about them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.graph.export.python_state.description.global_hooks import GLOBAL_HOOKS
from autoshard.graph.export.python_state.description.paths import (
    CHILDREN,
    FORWARD,
    HOOKS,
    MODE,
    Path,
    path_text,
)
from autoshard.graph.export.python_state.description.values import Value
from autoshard.graph.export.python_state.description.wording import shown, shown_path

_MOST = 5
_TENSOR: Value = {"tensor": True}


@dataclass(frozen=True, slots=True)
class Difference:
    """A place whose value is not that of the export.

    Attributes:
        path: the place.
        exported: its value when the model was exported.
        now: its value now.
        is_replaced: True for a module in the place of another one.
    """

    path: Path
    exported: Value
    now: Value
    is_replaced: bool = False

    @property
    def is_mode(self) -> bool:
        """True for the mode of a module."""
        return self.path[-1:] == (MODE,) and isinstance(self.exported, bool)

    @property
    def is_query(self) -> bool:
        """True for a state of torch, as whether gradients are enabled."""
        return self.path[:1] == ("torch:",) and str(self.path[-1]).endswith("()")

    @property
    def is_hook(self) -> bool:
        """True for the hooks of a module."""
        is_global = self.path[:1] == (GLOBAL_HOOKS,)
        return is_global or (bool(self.path) and self.path[-1] in HOOKS)

    @property
    def is_code(self) -> bool:
        """True for functions that run."""
        is_forward = bool(self.path) and self.path[-1] == FORWARD
        return is_forward or "__code__" in self.path

    @property
    def is_tensor(self) -> bool:
        """True for a tensor where there was none, or the other way round."""
        return [self.exported, self.now].count(_TENSOR) == 1

    @property
    def is_structure(self) -> bool:
        """True for modules that were replaced, added or removed."""
        is_module = isinstance(self.exported, dict) and "module" in self.exported
        return self.is_replaced or is_module or self.path[-1:] == (CHILDREN,)


def explain(differences: Iterable[Difference], modes: Mapping[Path, bool]) -> str:
    """One sentence for each kind of difference, with the ways out.

    Args:
        differences: at least one.
        modes: of the modules in the export.
    """
    kinds: list[tuple[Callable[[Difference], bool], Callable[[Sequence[Difference]], str]]] = [
        (lambda d: d.is_mode, lambda found: _modes(found, modes)),
        (lambda d: d.is_query, _queries),
        (lambda d: d.is_hook, _hooks),
        (lambda d: d.is_structure, _structure),
        (lambda d: d.is_code, _code),
        (lambda d: d.is_tensor, _tensors),
        (lambda _: True, _values),
    ]
    left, parts = list(differences), []
    for belongs, say in kinds:
        found = [one for one in left if belongs(one)]
        left = [one for one in left if not belongs(one)]
        if found:
            parts.append(say(found))
    return "; ".join(parts)


def _modes(found: Sequence[Difference], modes: Mapping[Path, bool]) -> str:
    parts = []
    for exported, then, now in (
        (True, "training", "evaluation"),
        (False, "evaluation", "training"),
    ):
        names = _listed(_owner(one) for one in found if one.exported is exported)
        if names:
            effect = "would go on in it" if exported else "would have no effect"
            parts.append(
                f"the mode of {names} is {now} now, but the plan was made from an export in {then} "
                f"mode, so {names} {effect}"
            )
    return (
        f"{'; '.join(parts)}: {_as_exported(modes)}, or plan an export in the present modes, and "
        f"pass all plans together, as in parallelize(model, {{'train': ..., 'eval': ...}}, mesh)"
    )


def _as_exported(modes: Mapping[Path, bool]) -> str:
    """The calls that set the modes of the export."""
    training = [path for path, mode in modes.items() if mode]
    evaluation = [path for path, mode in modes.items() if not mode]
    if not evaluation:
        return "call model.train()"
    if not training:
        return "call model.eval()"
    few, rest, mode = (
        (evaluation, "train", "eval")
        if len(evaluation) <= len(training)
        else (training, "eval", "train")
    )
    calls = " and ".join(f"model.{shown_path(path[:-1])}.{mode}()" for path in few[:_MOST])
    more = f" and {len(few) - _MOST} more" if len(few) > _MOST else ""
    return f"call model.{rest}(), then {calls}{more}"


def _queries(found: Sequence[Difference]) -> str:
    return (
        f"forward asks for {_changes(found)}: call the model in the same state, or plan an export "
        f"that is made in this one, as within torch.no_grad(), and pass all plans together; or, "
        f"{_ignored(found)}"
    )


def _hooks(found: Sequence[Difference]) -> str:
    added = [one for one in found if one.exported == {"hooks": []}]
    gone = [one for one in found if one not in added]
    parts = []
    if added:
        parts.append(
            f"hooks of {_listed(map(_owner, added))} do not run: the planned program replaces the "
            f"forward of inner modules, and has the hooks that the export traced: register them "
            f"before, and plan again; or, {_ignored(added)}"
        )
    if gone:
        parts.append(
            f"hooks of {_listed(map(_owner, gone))} are not those that the export traced, which "
            f"the planned program goes on to run: export and plan again; or, {_ignored(gone)}"
        )
    return "; ".join(parts)


def _structure(found: Sequence[Difference]) -> str:
    names = _listed(shown_path(one.path) for one in found)
    return (
        f"the modules {names} were replaced, added or removed after the export; the planned "
        f"program does not run them: change the model first, then export and plan; or, "
        f"{_ignored(found)}"
    )


def _code(found: Sequence[Difference]) -> str:
    return (
        f"the code of {_listed(shown_path(one.path) for one in found)} is not the code that was "
        f"exported, which the plan runs: export and plan again; or, {_ignored(found)}"
    )


def _tensors(found: Sequence[Difference]) -> str:
    return (
        f"{_changes(found)}; the planned program goes on with what was there. Set it back; or "
        f"export with a tensor there, one without effect at first, such as zeros, and change its "
        f"elements in place; or, {_ignored(found)}"
    )


def _values(found: Sequence[Difference]) -> str:
    return (
        f"{_changes(found)}; the planned program goes on with the value of the export. Set it "
        f"back; or plan an export with the new value, which may be passed together with this one; "
        f"or, to change it between calls, make it a buffer or an argument of forward; or, "
        f"{_ignored(found)}"
    )


def _changes(found: Sequence[Difference]) -> str:
    texts = [
        f"{shown_path(one.path)!r}, which is {shown(one.now)} now and was {shown(one.exported)} "
        f"when the model was exported"
        for one in found[:_MOST]
    ]
    more = [f"{len(found) - _MOST} more"] if len(found) > _MOST else []
    return " and ".join([*texts, *more])


def _ignored(found: Sequence[Difference]) -> str:
    patterns = list(dict.fromkeys(shown_path(one.path) for one in found))
    more = ", ..." if len(patterns) > _MOST else ""
    shown_patterns = ", ".join(map(repr, patterns[:_MOST]))
    return (
        f"where no result depends on it, pass ignore_state=[{shown_patterns}{more}] to parallelize"
    )


def _owner(difference: Difference) -> str:
    if difference.path[:1] == (GLOBAL_HOOKS,):
        return "all modules"
    return path_text(difference.path[:-1]) or "the model"


def _listed(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    text = ", ".join(map(repr, found[:_MOST]))
    return f"{text} and {len(found) - _MOST} more" if len(found) > _MOST else text
