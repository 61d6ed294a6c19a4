"""Checks of the arguments of public functions, by their signatures.

A signature is where an option is declared: its type, the values of a `Literal`, the range of an
`Annotated` number. `check_arguments` holds callers to it, so that no value means something else
than what its writer meant, such as "no" for True.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, wraps
from operator import index
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    SupportsIndex,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from autoshard.base.integers import MAX_BYTES, MAX_INT32, format_integer, has_64_bits
from autoshard.errors import ArgumentTypeError, OptionError

P = ParamSpec("P")
T = TypeVar("T")

MAX_SECONDS = 1e7
"""Longest time limit, about 16 weeks."""


def _number(value: object) -> object:
    """Refuse flags and texts: pydantic reads numbers from them."""
    if isinstance(value, bool | str | bytes):
        raise ValueError(f"Input should be a number, not {value!r:.60}")  # noqa: TRY004  pydantic's
    return value


Flag = Annotated[bool, Strict()]
"""True or False in a document, and nothing that may be read as one of them."""
Whole = Annotated[int, BeforeValidator(_number)]
"""A whole number in a document."""
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
"""A finite number in a document."""

Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
"""A number of things, one or more."""
DimIndex = Annotated[int, Field(ge=-64, le=63)]
"""A dim of a tensor, from the front or from the end; PyTorch's tensors have at most 64."""
Seed = Annotated[int, Field(ge=0, le=MAX_INT32)]
"""A seed of random numbers."""
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
"""A time limit, seconds."""
Wait = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
"""A time to wait, seconds; 0 for none."""
Work = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A number of floating-point operations."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, 0 to 1."""
FileBytes = Annotated[int, Field(ge=1, le=MAX_BYTES)]
"""A size of a file, bytes."""

_SCALARS = frozenset({bool, int, float, str, Path, NoneType})
_LISTS = frozenset({Collection, Iterable, Sequence})
_LIST = "a list of texts"
_WORDS = {
    "bool_type": "True or False",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "path_type": "a path",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a text that is not empty",
    "string_too_long": "a text of at most {max_length} characters",
    "Path": "a path",
    "PathLike": "a path",
    "Collection": _LIST,
    "Iterable": _LIST,
    "Sequence": _LIST,
    "sequence_str": _LIST,
    "iterable_type": _LIST,
}
"""Words for an allowed value, by pydantic's name of the error, or the name of a class."""
_TYPES = {
    *("bool_type", "int_type", "float_type", "string_type", "path_type"),
    *("is_instance_of", "sequence_str", "iterable_type"),
}
"""Those of the errors that are about the type of a value."""
_SHOWN = 60
"""Characters of a value that an error shows."""


def check_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function refuse arguments that its signature does not allow, before it does anything.

    Checked are numbers, flags, texts, choices, paths and lists of texts; what is declared as
    another type is the function's own affair. Nothing is converted: a flag is True or False, and a
    text is no number.

    Raises:
        ArgumentTypeError: on a call whose argument has another type; the message names it, with
            what is allowed.
        OptionError: on a call whose argument is out of range, or none of the choices.

    Example:
        >>> @check_arguments
        ... def scale(factor: int, *, reduce: Literal["sum", "mean"] = "sum") -> None: ...
        >>> scale(2, reduce="max")
        Traceback (most recent call last):
        autoshard.errors.OptionError: scale: reduce is 'max': it should be 'sum' or 'mean'
    """
    signature = inspect.signature(function)
    checked = dict(checked_arguments(function))
    name = function.__qualname__.removesuffix(".__init__")

    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        # A call that does not fit the signature fails with Python's own error.
        given = signature.bind_partial(*args, **kwargs).arguments
        for argument, annotation in checked.items():
            if argument in given:
                _check(name, argument, given[argument], annotation)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    @wraps(function)
    async def await_call(*args: P.args, **kwargs: P.kwargs) -> Any:
        check(*args, **kwargs)
        return await function(*args, **kwargs)  # type: ignore[misc]  # T is a coroutine

    is_awaited = inspect.iscoroutinefunction(function)
    return cast("Callable[P, T]", await_call) if is_awaited else call


def names_elsewhere(**places: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function say where to put what other libraries take as arguments of theirs.

    Args:
        **places: what to do instead, by the name of an argument that the function does not have.

    Raises:
        ArgumentTypeError: on a call with such an argument.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name in places:
                    raise ArgumentTypeError(
                        f"{function.__name__} has no argument {name!r}: {places[name]}"
                    )
            return function(*args, **kwargs)

        return call

    return decorate


def check_methods(kind: type[T]) -> type[T]:
    """Make the constructor and public methods of a class refuse arguments, by `check_arguments`.

    Methods that it inherits are those of its base classes.
    """
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod):
            setattr(kind, name, classmethod(check_arguments(member.__func__)))
        elif inspect.isfunction(member):
            setattr(kind, name, check_arguments(member))
    return kind


def checked_arguments(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a function that `check_arguments` checks, with their annotations."""
    for name, parameter in inspect.signature(function).parameters.items():
        is_single = parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        if is_single and _is_plain(parameter.annotation):
            yield name, parameter.annotation


def _is_plain(annotation: Any) -> bool:
    """True for numbers, flags, texts, choices and paths, unions and lists of texts of these."""
    if annotation in _SCALARS:
        return True
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _is_plain(inner[0])
    if kind in {Union, UnionType}:
        return all(map(_is_plain, inner))
    return kind in {Literal, PathLike} or (kind in _LISTS and inner == (str,))


def _check(function: str, name: str, value: Any, annotation: Any) -> None:
    number = value
    if isinstance(value, SupportsIndex) and not isinstance(value, int):
        # Such as an integer of numpy; arrays of several raise an error.
        with suppress(TypeError, ValueError, RuntimeError):
            number = index(value)
    try:
        _adapter(annotation).validate_python(number, strict=True)
        failures = [] if _has_texts(value, annotation) else [("iterable_type", _LIST)]
    except ValidationError as error:
        failures = [
            (one["type"], _words(one["type"], **one.get("ctx", {})))
            for one in error.errors(include_url=False, include_input=False)
        ]
    if failures:
        kinds, allowed = zip(*failures, strict=True)
        choices = " or ".join(dict.fromkeys(allowed))
        if isinstance(value, str) and choices == _LIST:
            choices += f", such as {value.split(',')}"
        error_type = ArgumentTypeError if _TYPES.issuperset(kinds) else OptionError
        raise error_type(f"{function}: {name} is {_shown(value)}: it should be {choices}")


def _words(kind: str, **context: Any) -> str:
    known = context["class"] if kind == "is_instance_of" else kind
    return _WORDS.get(known, "another value").format(**context)


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return str(value) if has_64_bits(value) else format_integer(value)
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _has_texts(value: Any, annotation: Any) -> bool:
    """False for a collection that is no list of texts where one is declared.

    A single text is none: Python takes it for a list of letters.
    """
    is_union = get_origin(annotation) in {Union, UnionType}
    kinds = get_args(annotation) if is_union else (annotation,)
    if not isinstance(value, Collection) or all(get_origin(kind) not in _LISTS for kind in kinds):
        return True
    if isinstance(value, str):
        return str in kinds
    return all(isinstance(item, str) for item in value)


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
