"""Planning options: what a program does in a step, and a group of options for each subject."""

import warnings
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    model_validator,
)

from autoshard.errors import ArgumentTypeError, OptionError
from autoshard.plan.options.constraints import ConstraintOptions
from autoshard.plan.options.group import (
    FrozenOptions,
    OptionGroup,
    unknown_option,
)
from autoshard.plan.options.memory import MemoryOptions
from autoshard.plan.options.pipeline import PipelineOptions
from autoshard.plan.options.runtime import RuntimeOptions
from autoshard.plan.options.solver import SolverOptions
from autoshard.plan.options.training import TrainingOptions

Mode = Literal["training", "inference"]


class PlanOptions(FrozenOptions):
    """Options of planning, with defaults that suit most users.

    They are stored, and written in JSON, in groups. In Python each is also a keyword of its own:
    the name of its field, or `memory_budget`, `solver` and `runtime` for the budget and the names
    of the two.

    Example:
        >>> options = PlanOptions(memory_budget="70GB", micro_batches=4)
        >>> options.memory.budget, options.training.micro_batches
        (70000000000, 4)
        >>> options == PlanOptions(memory={"budget": "70GB"}, training={"micro_batches": 4})
        True
    """

    mode: Mode = Field(
        default="training",
        description="training counts forward, backward and the optimizer step; inference forward.",
    )
    training: TrainingOptions = Field(
        default=TrainingOptions(), description="optimizer, element types and micro-batches."
    )
    memory: MemoryOptions = Field(
        default=MemoryOptions(), description="budget, resharding and recomputation."
    )
    pipeline: PipelineOptions = Field(
        default=PipelineOptions(), description="stages, cuts and schedule."
    )
    constraints: ConstraintOptions = Field(
        default=ConstraintOptions(), description="layouts that the plan must or may not have."
    )
    solver: SolverOptions = Field(
        default=SolverOptions(), description="solver, time limit and gap."
    )
    runtime: RuntimeOptions = Field(
        default=RuntimeOptions(), description="framework that executes the layout, and how."
    )

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **given: Any) -> None:
            super().__init__(**grouped_document(given))

        __init__.__pydantic_base_init__ = True

        def __getattr__(self, name: str) -> Any:
            if name not in _places():
                return super().__getattr__(name)
            place = ".".join(_places()[name])
            warnings.warn(f"read options.{place}", DeprecationWarning, stacklevel=2)
            return self.value(name)

    else:  # every option is a keyword

        def __init__(self, **given: Any) -> None: ...

    @model_validator(mode="wrap")
    @classmethod
    def _accept_ungrouped(
        cls, given: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Accept documents without groups, as version 1 of the plan document has them.

        A dict that is given as the context of validation gets the place of each of their options.
        """
        if not isinstance(given, Mapping) or not (names := _ungrouped_names(given)):
            return handler(given)
        try:
            found = handler(grouped_document(dict(given)))
        except OptionError as error:
            raise ValueError(str(error)) from None
        places = {name: ".".join(_places()[name]) for name in names}
        if isinstance(info.context, dict):
            info.context.update(places)
        else:
            moved = ", ".join(f"{name} is {place}" for name, place in places.items())
            warnings.warn(f"options are in groups: {moved}", DeprecationWarning, stacklevel=2)
        return found

    @classmethod
    def keywords(cls) -> tuple[str, ...]:
        """The name of each option as a keyword."""
        return ("mode", *_places())

    @property
    def given(self) -> dict[str, Any]:
        """The options that were set, by keyword; the others have their defaults."""
        groups = {name: getattr(self, name) for name in self.model_fields_set - {"mode"}}
        found = {"mode": self.mode} if "mode" in self.model_fields_set else {}
        return found | {
            keyword: getattr(groups[group], name)
            for keyword, (group, name) in _places().items()
            if group in groups and name in groups[group].model_fields_set
        }

    def value(self, keyword: str) -> Any:
        """The value of an option.

        Args:
            keyword: its name as a keyword.
        """
        group, name = _places().get(keyword, ("", keyword))
        return getattr(getattr(self, group) if group else self, name)

    def with_values(self, **values: Any) -> "PlanOptions":
        """Options with other values, which are not validated.

        Args:
            **values: by keyword.
        """
        update = {"mode": values.pop("mode")} if "mode" in values else {}
        fields: dict[str, dict[str, Any]] = {}
        for keyword, value in values.items():
            group, name = _places()[keyword]
            fields.setdefault(group, {})[name] = value
        for group, changed in fields.items():
            update[group] = getattr(self, group).model_copy(update=changed)
        return self.model_copy(update=update)


def to_options(options: PlanOptions | None, given: dict[str, Any]) -> PlanOptions:
    """The options of a call that takes them as `options`, as keywords, or both.

    Args:
        options: an object; the defaults if None.
        given: single options, which replace those of the object.

    Raises:
        OptionError: an option is invalid or does not exist; the message names a similar one.
    """
    if not isinstance(options, PlanOptions | None):
        raise ArgumentTypeError(
            f"options is {type(options).__name__}: pass PlanOptions(...), or single options as "
            f"keywords, such as memory_budget='70GB'"
        )
    if options is None:
        return PlanOptions(**given)
    if not given:
        return options
    chosen, new = options.given, _keywords(given)
    if "runtime" in new:
        # What the profile of the former runtime set does not hold for another one.
        profile = RuntimeOptions.profile_fields()
        chosen = {name: value for name, value in chosen.items() if name not in profile}
    return PlanOptions(**chosen | new)


@cache
def option_groups() -> Mapping[str, type[OptionGroup]]:
    """The groups of options, by name."""
    kinds = {name: field.annotation for name, field in PlanOptions.model_fields.items()}
    return {
        name: kind
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, OptionGroup)
    }


@cache
def _places() -> Mapping[str, tuple[str, str]]:
    """The group and the field of each option, by keyword."""
    return {
        keyword: (group, name)
        for group, kind in option_groups().items()
        for keyword, name in kind.keywords().items()
    }


def _is_group(name: str, value: Any) -> bool:
    is_table = isinstance(value, Mapping | OptionGroup)
    return name in option_groups() and (is_table or name not in _places())


def _ungrouped_names(given: Mapping[Any, Any]) -> tuple[str, ...]:
    places = _places()
    return tuple(name for name in given if name in places and not _is_group(name, given[name]))


def _keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options by keyword, those of given groups too.

    Raises:
        OptionError: one is given twice.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        is_group = isinstance(value, OptionGroup)
        table = {x: getattr(value, x) for x in value.model_fields_set} if is_group else value
        own = {name: value}
        if _is_group(name, table) and isinstance(table, Mapping):
            own = {option_groups()[name].keyword(str(x)): one for x, one in table.items()}
        if twice := sorted(own.keys() & found.keys()):
            raise OptionError(f"{twice[0]} is given twice, by itself and in its group")
        found |= own
    return found


def grouped_document(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a document in groups, of those that are given by keyword or in groups.

    Raises:
        OptionError: one is given twice, or does not exist.
    """
    found: dict[str, Any] = {}
    for name, value in _keywords(given).items():
        if name in _places():
            group, field = _places()[name]
            found.setdefault(group, {})[field] = value
        elif name == "mode":
            found[name] = value
        elif name in option_groups():
            known = ", ".join(option_groups()[name].keywords())
            raise OptionError(f"{name} is a group of options: give one of {known} by its name")
        else:
            raise unknown_option(name, list(PlanOptions.keywords()))
    return found
