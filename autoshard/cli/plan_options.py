"""Options of planning on the command line, made of the declarations of `PlanOptions`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from autoshard.base.files import read_file
from autoshard.base.quantities import MIN_PLAUSIBLE_BYTES, parse_bytes, unit_hint
from autoshard.cli.options import read_plan_file
from autoshard.cli.rendering.wording import in_flags
from autoshard.errors import InputError, OptionError
from autoshard.plan import PlanOptions
from autoshard.plan.options import (
    ConstraintOptions,
    Pins,
    RuntimeOptions,
    TrainingOptions,
    declared,
    option_groups,
)

_PIN_KINDS = {table.removesuffix("s"): table for table in Pins.model_fields}


_STORED_AS = Annotated[
    Path | None,
    typer.Option(
        "--stored-as",
        metavar="PLAN",
        rich_help_panel=ConstraintOptions.title,
        help="A plan file: store parameters and buffers as that plan does, so that one "
        "model can run both plans.",
    ),
]
_SKIP_ON = Annotated[
    list[str] | None,
    typer.Option(
        "--skip-fully-replicated-on",
        metavar="AXIS",
        rich_help_panel=ConstraintOptions.title,
        help="Shard each operator over as many ranks of this axis, or of these axes together, "
        "as it can be. Repeatable.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Planning:
    """Options of planning: those of `PlanOptions`, and others that stand for some of them."""

    def read(self) -> PlanOptions:
        """Read the options of planning.

        Raises:
            OptionError: one of them cannot be read; the message names it.
        """
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        for name, read in _READERS.items():
            if name in given:
                given[name] = read(given[name])
        stored_as = given.pop("stored_as", None)
        if stored_as is not None:
            pins = given.setdefault("pins", {})
            for kind, layouts in read_plan_file(stored_as).state_pins().model_dump().items():
                pins[kind] = layouts | pins.get(kind, {})
        axes = given.pop("skip_fully_replicated_on", None)
        if axes:
            given["skip_fully_replicated"] = axes
        if isinstance(given["runtime"], dict):
            given |= given.pop("runtime")
        return PlanOptions(**given)


def read_memory(text: str) -> int:
    """Read an amount of memory, such as 80GB.

    Raises:
        OptionError: it cannot be read, or it is a number without a unit that is too small.
    """
    try:
        nbytes = parse_bytes(text)
    except InputError as error:
        raise OptionError(f"--memory-budget: {error}") from None
    if nbytes < MIN_PLAUSIBLE_BYTES and text.strip().isdecimal():
        hint = unit_hint(nbytes) or "give a unit, such as 80GB"
        raise OptionError(f"--memory-budget {text} is {nbytes} bytes; {hint}")
    return nbytes


def _read_pins(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    pins: dict[str, dict[str, str]] = {}
    for text in texts:
        kind, colon, rest = text.partition(":")
        name, equals, layout = rest.partition("=")
        if not colon or not equals or kind not in _PIN_KINDS:
            raise OptionError(
                f"--pin {text!r} is not KIND:NAME=LAYOUT with KIND {', '.join(_PIN_KINDS)}, "
                "such as 'parameter:*.weight=S(0),R'"
            )
        same = pins.setdefault(_PIN_KINDS[kind], {})
        if same.setdefault(name, layout) != layout:
            raise OptionError(f"--pin {kind}:{name} is given twice, as {same[name]} and {layout}")
    return pins


def _read_forbidden(texts: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for text in texts:
        collective, _, axis = text.partition("@")
        kind, _, of = collective.partition(":")
        found.append({"kind": kind, "of": of or None, "axis": axis or None})
    return found


def _read_balance(text: str) -> str | list[int]:
    numbers = text.split(",")
    return [int(number) for number in numbers] if all(map(str.isdecimal, numbers)) else text


def _read_names(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",")]


def _read_number(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _read_runtime(text: str) -> str | dict[str, Any]:
    """The name of a runtime, or the profile of a JSON file."""
    if not text.endswith(".json"):
        return text
    try:
        profile = json.loads(read_file(Path(text), OptionError))
    except ValueError as error:
        raise OptionError(f"--runtime {text}: {error}") from None
    if not isinstance(profile, dict):
        raise OptionError(f"--runtime {text}: it is not an object with fields of `runtime`")
    return {RuntimeOptions.keyword(name): value for name, value in profile.items()}


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "memory_budget": read_memory,
    "pins": _read_pins,
    "forbid": _read_forbidden,
    "balance": _read_balance,
    "export_roles": _read_names,
    "stages": _read_number,
    "stages_per_rank": _read_number,
    "runtime": _read_runtime,
}
"""Readers of options whose texts pydantic does not read, by keyword."""


def _options() -> Iterator[tuple[str, Any, Any]]:
    """The fields of the dataclass: name, annotation for Typer, and default."""
    mode = PlanOptions.model_fields["mode"]
    yield _option("mode", ("--mode",), mode, TrainingOptions.title)
    for kind in option_groups().values():
        names = kind.keywords()
        for keyword, flags in kind.flags().items():
            yield _option(keyword, flags, kind.model_fields[names[keyword]], kind.title)
    yield "stored_as", _STORED_AS, field(default=None)
    yield "skip_fully_replicated_on", _SKIP_ON, field(default=None)


def _option(
    keyword: str, flags: tuple[str, ...], declaration: FieldInfo, panel: str
) -> tuple[str, Any, Any]:
    annotation, default = _text_type(declaration)
    more = declared(declaration)
    if annotation == bool | None:
        flags = (f"{flags[0]}/--no{flags[0][1:]}",)
    limits = {"min": Ge, "max": Le} if annotation is int else {}
    if more.may_be_chosen:
        annotation, default = annotation | None, None
    option = typer.Option(
        *flags,
        help=more.help or _help(str(declaration.description)),
        metavar=more.metavar,
        rich_help_panel=panel,
        **{
            name: getattr(limit, kind.__name__.lower())
            for name, kind in limits.items()
            for limit in declaration.metadata
            if isinstance(limit, kind)
        },
    )
    return keyword, Annotated[annotation, option], field(default=default)


def _help(description: str) -> str:
    text = description.removeprefix("whether ").removeprefix("to ")
    text = text.replace("if null", "by default").replace("If null", "By default")
    return in_flags(text[0].upper() + text[1:])


def _text_type(declaration: FieldInfo) -> tuple[Any, Any]:
    """The type of an option for Typer, and its default.

    What is a number, a flag or a choice stays so; lists are repeated texts, others one text.
    """
    kinds = [kind for kind in _members(declaration.annotation) if kind is not NoneType]
    may_be_none = len(kinds) < len(_members(declaration.annotation))
    default = declaration.default
    if kinds[0] is bool or (kinds[0] in (int, float) and len(kinds) == 1 and not may_be_none):
        return (kinds[0] | None if may_be_none else kinds[0]), default
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return kinds[0], default
    if all(get_origin(kind) is Literal for kind in kinds):
        values = tuple(value for kind in kinds for value in get_args(kind))
        choice: Any = Literal.__getitem__(values)
        return (choice | None if may_be_none else choice), default
    if len(kinds) == 1 and not issubclass(get_origin(kinds[0]) or kinds[0], str | int):
        return list[str] | None, None
    return str | None, default if isinstance(default, str) else None


def _members(annotation: Any) -> list[Any]:
    """The types of a union, without what annotates them."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in {Union, UnionType}:
        return [annotation]
    return [kind for one in get_args(annotation) for kind in _members(one)]


if TYPE_CHECKING:
    Planning: TypeAlias = _Planning
else:
    Planning = make_dataclass(
        "Planning",
        list(_options()),
        bases=(_Planning,),
        namespace={"__doc__": _Planning.__doc__},
        frozen=True,
        kw_only=True,
    )
