"""Base class of groups of options; keyword, flags and help of an option."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from autoshard.base.names import did_you_mean
from autoshard.errors import OptionError

Pattern = Annotated[str, Field(min_length=1, max_length=512)]
"""A name, or a pattern of names in which `*` matches any text."""
Patterns = Annotated[tuple[Pattern, ...], Field(max_length=1024, fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Keyword, flags and help of an option, where its field does not say them.

    Attributes:
        keyword: its name among those of all groups, in Python and in messages; that of the field
            if None.
        flags: on the command line; one made of the keyword if None, none if empty.
        metavar: its value there.
        help: its text there; the field's description if None.
        may_be_chosen: True if a command may choose the value where the flag is not given.
    """

    keyword: str | None = None
    flags: tuple[str, ...] | None = None
    metavar: str | None = None
    help: str | None = None
    may_be_chosen: bool = False


def declared(field: FieldInfo) -> Declared:
    """Keyword, flags and help of an option, from the annotation of its field."""
    return next((one for one in field.metadata if isinstance(one, Declared)), Declared())


_CHOICES = frozenset({"enum", "literal_error"})


class FrozenOptions(BaseModel):
    """Base class of what options contain: immutable, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise option_error(error, type(self)) from None

        # Only direct calls run it: validation of documents reports all its errors itself.
        __init__.__pydantic_base_init__ = True


class OptionGroup(FrozenOptions):
    """Base class of groups of options.

    Attributes:
        title: heading of the group in help and documentation.
    """

    title: ClassVar[str]

    @classmethod
    def keywords(cls) -> dict[str, str]:
        """The name of each field by its keyword."""
        return {cls.keyword(name): name for name in cls.model_fields}

    @classmethod
    def flags(cls) -> dict[str, tuple[str, ...]]:
        """The flags on the command line of each option that has some, by keyword."""
        found = {}
        for keyword, name in cls.keywords().items():
            own = declared(cls.model_fields[name]).flags
            found[keyword] = (f"--{keyword.replace('_', '-')}",) if own is None else own
        return {keyword: flags for keyword, flags in found.items() if flags}

    @classmethod
    def keyword(cls, name: str) -> str:
        """The keyword of a field; its name if the group has no such field."""
        field = cls.model_fields.get(name)
        return (field and declared(field).keyword) or name


def option_error(error: ValidationError, kind: type[BaseModel]) -> OptionError:
    """The error of invalid options, about the first of them.

    Args:
        error: found by validation.
        kind: type of the options.
    """
    found = [
        # The choices alone would not say which value is none of them.
        one | {"msg": f"{one['msg']}, not {one['input']!r:.60}"} if one["type"] in _CHOICES else one
        for one in error.errors(include_url=False, include_context=False)
    ]
    first = found[0]
    length = _length_of_name(first["loc"], kind)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == length:
        owner = kind if length == 1 else _group(kind, first["loc"][0])
        return unknown_option(str(first["loc"][-1]), list((owner or kind).model_fields))
    same = [one for one in found if one["loc"][:length] == first["loc"][:length]]
    texts = dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in same)
    return OptionError(f"{_named(first['loc'], kind)}: {'; or: '.join(texts)}")


def unknown_option(name: str, known: list[str]) -> OptionError:
    """The error of an option that does not exist.

    Args:
        name: of that option.
        known: names of those that exist.
    """
    hint = did_you_mean(name, known) or f"; the options are {', '.join(known)}"
    return OptionError(f"there is no option {name!r}{hint}")


def _group(kind: type[BaseModel], name: int | str) -> type[OptionGroup] | None:
    field = kind.model_fields.get(str(name))
    annotation = None if field is None else field.annotation
    is_group = isinstance(annotation, type) and issubclass(annotation, OptionGroup)
    return cast("type[OptionGroup]", annotation) if is_group else None


def _length_of_name(place: tuple[int | str, ...], kind: type[BaseModel]) -> int:
    """Number of parts of an error's place that name an option: its group, and itself."""
    return min(len(place), 1 + (_group(kind, place[0]) is not None)) if place else 0


def _named(place: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """The option that an error is about, by its keyword.

    Inside an option there are numbers of its items, and names of types that it may have; the names
    in a table of pins are the caller's.
    """
    first, *inside = place or ("options",)
    group = _group(kind, first)
    if group is None or not inside:
        return str(first)
    name = str(inside[0])
    keyword = group.keyword(name)
    return ".".join(map(str, (keyword, *inside[1:]))) if name == "pins" else keyword
