"""A table of kinds of layers and mesh axes: placements of weights and of activations."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import Field

from autoshard.plan.predictions import Document
from autoshard.pricing.axis_roles import AxisKey, AxisRole, Roles, Storage, Subject, percent, shares
from autoshard.pricing.module_kinds import ModuleKind

_NEGLIGIBLE = 0.005
"""Shares that are left out; if they are the rest, a placement has no share."""
_OTHER = "other operators"

Key = TypeVar("Key", Storage, str)


class LayerRow(Document):
    """Kinds of layers that are placed alike, and what each axis does to them."""

    layers: tuple[str, ...] = Field(description="kinds of layers, such as attention and MLP")
    weights: tuple[str, ...] = Field(
        description="placement of their parameters along each axis, with shares of bytes if mixed; "
        "gathered: before operators read them (FSDP)"
    )
    activations: tuple[str, ...] = Field(
        description="placement of the results of their operators along each axis, before they are "
        "reduced or gathered, with shares of elements if mixed"
    )

    @property
    def name(self) -> str:
        """The kinds of layers in one text."""
        return ", ".join(self.layers)


def layer_rows(roles: Roles) -> tuple[LayerRow, ...]:
    """The rows of all kinds of layers of a plan, in the order of `ModuleKind`.

    Args:
        roles: the roles of its axes.
    """
    found = {subject for subject, _ in roles.work}
    kinds: list[Subject] = [kind for kind in ModuleKind if kind in found]
    alike: defaultdict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for kind in kinds or [None]:
        weights = tuple(_placements(kind, axis, roles.stored) for axis in roles.sizes)
        activations = tuple(_placements(kind, axis, roles.results) for axis in roles.sizes)
        alike[weights, activations].append(_OTHER if kind is None else str(kind))
    return tuple(
        LayerRow(layers=tuple(names), weights=weights, activations=activations)
        for (weights, activations), names in alike.items()
        if roles.sizes
    )


def _placements(
    kind: Subject, axis: str, amounts: Mapping[tuple[Subject, AxisKey], Counter[Key]]
) -> str:
    """The placements of one kind of layer along an axis; in stages, of all of its sizes."""
    total: Counter[Key] = Counter()
    for (subject, (name, _)), counted in amounts.items():
        if (subject, name) == (kind, axis):
            total.update(counted)
    return ", ".join(_shown(shares(total))) or "-"


def _shown(parts: Mapping[Key, float]) -> Iterator[str]:
    for placement, share in parts.items():
        if share > 1 - _NEGLIGIBLE:
            yield str(placement)
        elif share > _NEGLIGIBLE:
            yield f"{placement} {percent(share)}"


def layout_name(roles: Roles) -> str:
    """A layout in the words of the field, such as `FSDP 2 x FSDP/TP 4`; one device if it has one.

    Each axis is named for what more than a negligible share of operations or parameters do along
    it; several words are of different layers.
    """
    parts = [f"PP {number}" for number in roles.divided.values()]
    for use in roles.axes:
        if use.work:
            words = _axis_words(use.work, use.stored)
            parts.append(f"{'/'.join(words)} {use.size // roles.divided.get(use.name, 1)}")
    return " x ".join(parts) or "one device"


def _axis_words(work: Mapping[AxisRole, float], stored: Mapping[Storage, float]) -> list[str]:
    is_gathered = sum(s for storage, s in stored.items() if storage.gathered) > _NEGLIGIBLE
    words = {
        AxisRole.BATCH: "FSDP" if is_gathered else "DP",
        AxisRole.FEATURES: "TP",
        AxisRole.SEQUENCE: "CP",
        AxisRole.EXPERTS: "EP",
        AxisRole.IDLE: "replicated",
    }
    return [words[role] for role, share in work.items() if share > _NEGLIGIBLE]
