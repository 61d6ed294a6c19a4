"""The options that rule out plans, in the words of messages and certificates."""

from collections.abc import Iterable, Iterator, Mapping

from autoshard.plan.options import (
    ConstraintOptions,
    ForbiddenCollective,
    MemoryOptions,
    OptionGroup,
    Pins,
    PipelineOptions,
    PlanOptions,
    SkipReplicated,
)

_ELSEWHERE: Mapping[type[OptionGroup], tuple[str, ...]] = {
    MemoryOptions: (
        "reshard_after_forward",
        "regather_activations",
        "activation_checkpointing",
        "checkpointed_modules",
    ),
    PipelineOptions: ("cuts", "balance", "schedule", "stages_per_rank"),
}
"""The options outside of `ConstraintOptions` that rule out plans."""


def _defaults(group: type[OptionGroup], names: Iterable[str]) -> dict[str, object]:
    return {group.keyword(name): group.model_fields[name].default for name in names}


FREE: Mapping[str, object] = {
    **{k: v for group, names in _ELSEWHERE.items() for k, v in _defaults(group, names).items()},
    **_defaults(ConstraintOptions, ConstraintOptions.model_fields),
}
"""The options that rule out plans, with the value that rules out none: their default."""

_KINDS = {
    "input": "inputs",
    "parameter": "parameters",
    "buffer": "buffers",
    "node": "nodes",
    "output": "outputs",
}


def restrictions(options: PlanOptions) -> tuple[str, ...]:
    """The restrictions that options set, each as `option 'value'`; empty if they rule out no plan.

    The memory budget and the number of pipeline stages are not among them.
    """
    return tuple(_restrictions(options))


def without_restrictions(options: PlanOptions) -> PlanOptions:
    """Options that rule out no plan; memory budget, number of stages and others are kept."""
    return options.with_values(**dict(FREE))


def pin_label(kind: str, name: str, layout: str) -> str:
    """A pin in words."""
    return f"pin of {kind} {name!r} to {layout!r}"


def forbid_label(forbidden: ForbiddenCollective) -> str:
    """A forbidden collective in words."""
    return f"forbidden {forbidden}"


def skip_label(wanted: SkipReplicated) -> str:
    """The option `skip_fully_replicated` in words, with the axes that it names."""
    return option_label(
        "skip_fully_replicated", wanted if isinstance(wanted, bool) else ", ".join(wanted)
    )


def option_label(name: str, value: object) -> str:
    """An option with a value in words; a flag is its name alone."""
    return name if value is True else f"{name} {value!r}"


def pins_by_kind(pins: Pins) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The kind of tensor and the layouts by name of each table of pins."""
    for kind, table in _KINDS.items():
        yield kind, getattr(pins, table)


def _restrictions(options: PlanOptions) -> Iterator[str]:
    for kind, table in pins_by_kind(options.constraints.pins):
        for name, layout in table.items():
            yield pin_label(kind, name, layout)
    yield from map(forbid_label, options.constraints.forbid)
    for name, free in FREE.items():
        value = options.value(name)
        if name in {"pins", "forbid"} or value in (free, ()):
            continue
        if name == "skip_fully_replicated":
            yield skip_label(value)
            continue
        is_list = name in {"cuts", "checkpointed_modules", "export_roles"}
        yield option_label(name, ", ".join(value) if is_list else value)
