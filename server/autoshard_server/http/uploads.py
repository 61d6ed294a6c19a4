"""Reading the bodies of requests, within limits."""

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from autoshard_server.answering.requests import PlanOrder
from autoshard_server.problems import MEDIA_TYPE, MULTIPART, REQUEST, TOO_LARGE, ServerError
from autoshard_server.settings import Settings

_Asked = TypeVar("_Asked", bound=BaseModel)

_PARTS = ("graph", "request")
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)


MULTIPART_FORM = "multipart/form-data"
JSON = "application/json"


async def read_upload(request: Request, settings: Settings) -> tuple[PlanOrder, bytes]:
    """The two parts of the form: what to plan for, and the graph.

    Raises:
        ServerError: the form cannot be read, or a part is missing, too large or not valid.
    """
    parts = await _read_parts(request, settings)
    return parse(PlanOrder, parts["request"], "part 'request'"), parts["graph"]


async def read_json(request: Request, model: type[_Asked], settings: Settings) -> _Asked:
    """The JSON body of a request.

    Raises:
        ServerError: the body is no such JSON, or too large.
    """
    return parse(model, await read_text(request, settings, "max_request_bytes"), "body")


async def read_text(request: Request, settings: Settings, limit_name: str) -> bytes:
    """The body of a request that says that it is JSON, as it came.

    Raises:
        ServerError: it says something else, or is larger than the limit of the name.
    """
    if media_type(request) != JSON:
        raise ServerError(MEDIA_TYPE, f"send {JSON}")
    return await read_bytes(request, settings, limit_name)


async def read_bytes(request: Request, settings: Settings, limit_name: str) -> bytes:
    """The whole body.

    Args:
        request: whose body.
        settings: of the service.
        limit_name: the one that says how many bytes there may be.

    Raises:
        ServerError: TOO_LARGE, where there are more.
    """
    limit = getattr(settings, limit_name)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large("body", limit, limit_name)
    return bytes(body)


def media_type(request: Request) -> str:
    """What the body is said to be, in lower case and without parameters."""
    given: str = request.headers.get("content-type", "")
    return given.partition(";")[0].strip().lower()


def _too_large(what: str, limit: int, limit_name: str) -> ServerError:
    name = f"AUTOSHARD_{limit_name.upper()}"
    return ServerError(
        TOO_LARGE,
        f"the {what} exceeds {limit:,} bytes ({name})",
        extensions={"limit": limit, "limit_name": name},
    )


async def _read_parts(request: Request, settings: Settings) -> dict[str, bytes]:
    count = len(_PARTS)
    limits = {"max_files": count, "max_fields": count}
    try:
        async with request.form(**limits, max_part_size=settings.max_request_bytes) as form:
            return await _take_parts(form, settings.max_request_bytes)
    except HTTPException as error:
        raise ServerError(MULTIPART, f"the form cannot be read: {error.detail}") from None


async def _take_parts(form: FormData, limit: int) -> dict[str, bytes]:
    names = sorted(name for name, _ in form.multi_items())
    if names != sorted(_PARTS):
        raise ServerError(MULTIPART, f"the form has the parts {names}; it needs {list(_PARTS)}")
    graph, asked = form["graph"], form["request"]
    if not isinstance(graph, UploadFile):
        raise ServerError(MULTIPART, "send the part 'graph' as a file, with a filename")
    text = await asked.read() if isinstance(asked, UploadFile) else asked.encode()
    if len(text) > limit:
        raise _too_large("part 'request'", limit, "max_request_bytes")
    return {"graph": await graph.read(), "request": text}


def parse(model: type[_Asked], text: bytes, where: str) -> _Asked:
    """Read JSON text.

    Raises:
        ServerError: REQUEST, which points at everything that is wrong.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        found = [
            {"pointer": _pointer(e["loc"]), "detail": e["msg"]}
            for e in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        first = found[0]
        raise ServerError(
            REQUEST,
            f"the {where} is not valid at {first['pointer'] or 'its root'}: {first['detail']}",
            extensions={"errors": found},
        ) from None


def _pointer(location: tuple[int | str, ...]) -> str:
    """RFC 6901 pointer into the JSON of the part; the tags of our unions are no part of it."""
    tags = {("mesh", "shorthand"), ("mesh", "document")}
    steps = [s for i, s in enumerate(location) if i != 1 or location[:2] not in tags]
    return "".join("/" + str(s).replace("~", "~0").replace("/", "~1") for s in steps)


def preferred_wait(request: Request, *, cap: float) -> float | None:
    """Seconds of `Prefer: wait=N` (RFC 7240), at most the cap; None where it is not there."""
    found = _WAIT.search(",".join(request.headers.getlist("prefer")))
    return None if found is None else min(float(found[1]), cap)
