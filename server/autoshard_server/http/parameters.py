"""Parameters of routes: paths, pages, bodies and headers."""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

import anyio.to_thread
from fastapi import Depends, Path, params
from fastapi.dependencies.utils import get_flat_params
from pydantic import BaseModel, ValidationError
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from autoshard.base.schemas import listed_errors
from autoshard_server.http.deprecation import note_deprecated
from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.requests import CreatePlanRequest, check_limit
from autoshard_server.service import Service
from autoshard_server.settings import Settings

_Model = TypeVar("_Model", bound=BaseModel)

MULTIPART_FORM = "multipart/form-data"
JSON = "application/json"
BYTES = "application/octet-stream"

_PARTS = ("graph", "request")
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d+)\"?(?=$|[,;\s])", re.IGNORECASE)

_MAX_SHOWN = 100
"""Largest number of characters of a name in a message; the caller chooses it."""

QUICK_BYTES = 4096
"""JSON that is validated at once; that of usual requests is shorter."""


class _PathSegment(StringConvertor):
    """One segment of a path, without a custom method (AIP-136) after it."""

    regex = "[^/:]+"


register_url_convertor("segment", _PathSegment())


def _service(request: Request) -> Service:
    return cast("Service", request.app.state.service)


ServiceParameter = Annotated[Service, Depends(_service)]
PlanId = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="id of a plan")]
GraphDigest = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="sha256 of the graph's bytes, in hex")
]
JobId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="id of a job")]


async def read_upload(request: Request, settings: Settings) -> tuple[CreatePlanRequest, bytes]:
    """The two parts of the form: the request, and the graph.

    Raises:
        ServerError: the form cannot be read, or a part is missing, too large or not valid.
    """
    count, limit = len(_PARTS), settings.max_request_bytes
    try:
        async with request.form(max_files=count, max_fields=count, max_part_size=limit) as form:
            text, graph = await _read_parts(form, limit)
    except HTTPException as error:
        detail = f"the form cannot be read: {error.detail}"
        raise ServerError(ProblemType.MULTIPART, detail) from None
    return await parse_json(request, CreatePlanRequest, text, "part 'request'", settings), graph


async def read_json(request: Request, model: type[_Model], settings: Settings) -> _Model:
    """The JSON body of a request.

    Raises:
        ServerError: the body is not valid JSON of the model, or too large.
    """
    text = await read_text(request, settings, "max_request_bytes")
    return await parse_json(request, model, text, "body", settings)


async def read_text(request: Request, settings: Settings, limit_name: str) -> bytes:
    """The body of a request as JSON, unparsed.

    Raises:
        ServerError: it is larger than the named limit, or has too many values.
    """
    text = await read_bytes(request, settings, limit_name)
    check_values(text, settings)
    return text


async def read_bytes(request: Request, settings: Settings, limit_name: str) -> bytes:
    """The whole body.

    Args:
        request: with the body.
        settings: of the service.
        limit_name: the setting that limits its bytes.

    Raises:
        ServerError: TOO_LARGE.
    """
    limit = getattr(settings, limit_name)
    # Unlike a bytearray, it gives its bytes without copying them.
    body = BytesIO()
    async for chunk in request.stream():
        if body.tell() + len(chunk) > limit:
            raise _too_large("body", limit, limit_name)
        body.write(chunk)
    return body.getvalue()


def media_type(request: Request) -> str:
    """The Content-Type, in lower case and without parameters; that of bytes without one.

    A sender that names none may mean bytes (RFC 9110, section 8.3), as `curl -T` does.
    """
    value: str = ",".join(request.headers.getlist("content-type"))
    return value.partition(";")[0].strip().lower() or BYTES


async def parse_json(
    request: Request, model: type[_Model], text: bytes, where: str, settings: Settings
) -> _Model:
    """Parse and validate the JSON of a request; in a thread if that takes long.

    Raises:
        ServerError: REQUEST, with a pointer to each error; LIMIT, if it has too many values.
    """
    check_values(text, settings)
    deprecated: dict[str, str] = {}
    if len(text) <= QUICK_BYTES:
        found = parse(model, text, where, deprecated)
    else:
        found = await anyio.to_thread.run_sync(partial(parse, model, text, where, deprecated))
    note_deprecated(request, deprecated)
    return found


def check_values(text: bytes, settings: Settings) -> None:
    """Refuse JSON with more values than this service allows, before it is parsed.

    Raises:
        ServerError: LIMIT.
    """
    # Each value but the first follows one of these characters; in strings they count too.
    number = sum(map(text.count, (b",", b":", b"[", b"{")))
    check_limit("max_request_values", number, "values of a request", settings)


def parse(model: type[_Model], text: bytes, where: str, deprecated: dict[str, str]) -> _Model:
    """Parse and validate JSON text.

    Args:
        model: of the text.
        text: of the body, or of a part of it.
        where: the name of that in messages.
        deprecated: to which names that will be removed are added, with what replaces them.

    Raises:
        ServerError: REQUEST, with a pointer to each error.
    """
    try:
        read = model.model_validate_json(text, context=deprecated)
    except ValidationError as error:
        found = [{"pointer": _pointer(e["loc"]), "detail": e["msg"]} for e in listed_errors(error)]
        many = {"pointer": "", "detail": f"{error.error_count():,} errors, too many to list"}
        first = found[0] if found else many
        raise ServerError(
            ProblemType.REQUEST,
            f"the {where} is not valid at {first['pointer'] or 'its root'}: {first['detail']}",
            extensions={"errors": found or [many]},
        ) from None
    check_members(text)
    return read


def check_members(text: bytes) -> None:
    """Refuse valid JSON with an object that has a member twice: programs take different ones.

    Raises:
        ServerError: REQUEST (RFC 8259, section 4).
    """

    def check_object(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            ((name, number),) = Counter(name for name, _ in pairs).most_common(1)
            detail = f"an object has the member {name[:_MAX_SHOWN]!r} {number} times"
            raise ServerError(
                ProblemType.REQUEST,
                f"the JSON is not valid: {detail}",
                extensions={"errors": [{"pointer": "", "detail": detail}]},
            )

    json.loads(text, object_pairs_hook=check_object)


def refuse_unknown_parameters(request: Request) -> None:
    """Refuse a query with parameters that the route does not have, or has only one of.

    Raises:
        ServerError: REQUEST, with a pointer to each.
    """
    route = request.scope.get("route")
    dependant = getattr(route, "dependant", None)
    if not request.query_params or dependant is None:
        return
    others = params.Path | params.Header | params.Cookie
    fields = get_flat_params(dependant)
    # Those that are members of a model have no class of their own.
    known = {field.alias for field in fields if not isinstance(field.field_info, others)}
    unknown = sorted(request.query_params.keys() - known)
    repeated = Counter(name for name, _ in request.query_params.multi_items())
    single = (field.alias for field in fields if not _is_list(field.field_info.annotation))
    twice = next((name for name in single if repeated[name] > 1), None)
    if twice is not None:
        detail = "send it once: of several values, programs take different ones"
        raise ServerError(
            ProblemType.REQUEST,
            f"the query has the parameter {twice!r} {repeated[twice]} times; {detail}",
            extensions={"errors": [{"pointer": f"/query/{twice}", "detail": detail}]},
        )
    if unknown:
        detail = f"the parameters are {', '.join(sorted(known)) or 'none'}"
        found = [{"pointer": f"/query/{name}", "detail": detail} for name in unknown]
        raise ServerError(
            ProblemType.REQUEST,
            f"there is no parameter {unknown[0]!r} of the query: {detail}",
            extensions={"errors": found},
        )


def _is_list(annotation: Any) -> bool:
    """True for the type of a parameter that may be sent several times."""
    return any(get_origin(kind) is list for kind in (annotation, *get_args(annotation)))


def refuse_other_media_types(request: Request) -> None:
    """Refuse a body of a type that the route does not list in the specification.

    Raises:
        ServerError: MEDIA_TYPE, with the types that it takes.
    """
    extra = getattr(request.scope.get("route"), "openapi_extra", None) or {}
    accepted = list(extra.get("requestBody", {}).get("content", ()))
    kind = media_type(request)
    if accepted and kind not in accepted:
        given = f"is {kind!r}" if "content-type" in request.headers else "is missing"
        raise ServerError(
            ProblemType.MEDIA_TYPE,
            f"the Content-Type {given}; send {' or '.join(accepted)}",
            headers={"Accept": ", ".join(accepted)},
            extensions={"accepted": accepted},
        )


def preferred_wait(request: Request, *, cap: float) -> float | None:
    """Seconds of `Prefer: wait=N` (RFC 7240), at most the cap; None without it."""
    found = _WAIT.search(",".join(request.headers.getlist("prefer")))
    return None if found is None else min(float(found[1]), cap)


def is_not_modified(request: Request, tag: str) -> bool:
    """True if If-None-Match has the tag (RFC 9110, section 13); a weak tag matches too."""
    tags = _tags(request, "if-none-match") or frozenset()
    return not {"*", f'"{tag}"'}.isdisjoint(tags)


def precondition(request: Request) -> Callable[[str | None], bool]:
    """If-Match and If-None-Match of a request that changes its target (RFC 9110, section 13).

    Returns:
        a function that returns true if the change is allowed, given the target's tag without
        quotes, or None if there is no target.
    """
    match, none_match = _tags(request, "if-match"), _tags(request, "if-none-match")

    def is_allowed(tag: str | None) -> bool:
        current = set() if tag is None else {"*", f'"{tag}"'}
        if match is not None and current.isdisjoint(match):
            return False
        return none_match is None or current.isdisjoint(none_match)

    return is_allowed


def _tags(request: Request, header: str) -> frozenset[str] | None:
    """The tags of a header; a compressed response had a weak one, of the same document."""
    values = request.headers.getlist(header)
    found = (tag.strip().removeprefix("W/") for tag in ",".join(values).split(","))
    return frozenset(found) if values else None


async def _read_parts(form: FormData, limit: int) -> tuple[bytes, bytes]:
    names = sorted(name for name, _ in form.multi_items())
    if names != sorted(_PARTS):
        raise ServerError(
            ProblemType.MULTIPART, f"the form has the parts {names}; it needs {list(_PARTS)}"
        )
    graph, request = form["graph"], form["request"]
    if not isinstance(graph, UploadFile):
        raise ServerError(ProblemType.MULTIPART, "send the part 'graph' as a file, with a filename")
    text = await request.read() if isinstance(request, UploadFile) else request.encode()
    if len(text) > limit:
        raise _too_large("part 'request'", limit, "max_request_bytes")
    return text, await graph.read()


def _too_large(part: str, limit: int, limit_name: str) -> ServerError:
    detail = f"the {part} exceeds {limit:,} bytes"
    return limit_error(ProblemType.TOO_LARGE, detail, limit_name, limit)


def _pointer(location: tuple[int | str, ...]) -> str:
    """RFC 6901 pointer into the JSON of the part, without the tags of unions."""
    tags = {("mesh", "shorthand"), ("mesh", "document")}
    steps = [s for i, s in enumerate(location) if i != 1 or location[:2] not in tags]
    return "".join("/" + str(s).replace("~", "~0").replace("/", "~1") for s in steps)
