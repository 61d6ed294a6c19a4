"""Errors of the service as RFC 9457 problem details, with a table from exception to problem.

Solver processes import it too, so it does not import the web framework.
"""

import errno
from collections.abc import Mapping
from enum import Enum
from typing import Any

from autoshard import errors
from autoshard_server.limits import limit_name
from autoshard_solver_cache import StoreFullError, StoreUnavailableError

PROBLEM_MEDIA_TYPE = "application/problem+json"

PROBLEMS_PATH = "/problems"
"""Path of the page of this service that describes the kinds of problems."""

TYPE_PREFIX = f"{PROBLEMS_PATH}#"
"""Start of every problem `type`, a reference to that page; the slug after it never changes."""


class ProblemType(Enum):
    """A kind of problem: HTTP status, title, and its cause and remedy.

    The slug at the end of the `type` URI is made of the member's name.
    """

    ARCHIVE = (
        400,
        "The graph cannot be read",
        "The part 'graph' is not a readable .pt2 archive or model.json, or exceeds a limit.",
    )
    PROGRAM = (
        422,
        "The program cannot be parsed",
        "The archive's model.json is not an exported program of a supported version.",
    )
    UNSUPPORTED = (
        422,
        "The program uses something without a rule",
        "An operator or a feature of the exported program cannot be sharded yet.",
    )
    GRAPH = (
        422,
        "The graph cannot be planned",
        "The program was read, but cannot be planned with this request.",
    )
    MESH = (
        422,
        "Invalid mesh",
        "Shape, topology, bandwidths or backend are wrong or contradict each other.",
    )
    OPTIONS = (
        422,
        "Invalid options",
        "Planning options contradict each other, the graph or a limit of this service.",
    )
    CONFIG = (
        422,
        "The config cannot be used",
        (
            "The member 'config' is not the config.json of a text model of the installed "
            "transformers, names code or kernels to run, or has fewer positions than the request."
        ),
    )
    INPUT = (422, "Invalid input", "Another part of the input cannot be used.")
    REQUEST = (
        422,
        "Invalid request",
        "A field is missing, unknown or of the wrong type; 'errors' has a pointer to each.",
    )
    HOST = (
        400,
        "No Host header",
        (
            "A request of HTTP/1.1 has exactly one Host header, that of its address if the request "
            "line has a whole one (RFC 9112, section 3.2)."
        ),
    )
    MULTIPART = (
        400,
        "The form cannot be read",
        "The body is not the multipart/form-data that this route expects.",
    )
    MEDIA_TYPE = (
        415,
        "Unsupported media type",
        "This route does not accept the Content-Type; 'detail' names those that it accepts.",
    )
    CONTENT_CODING = (
        415,
        "Unsupported or wrong Content-Encoding",
        "Content-Encoding may be gzip, zstd or identity, and must match the body.",
    )
    TOO_LARGE = (
        413,
        "The body is too large",
        "The body exceeds 'limit' bytes; export the model on the meta device.",
    )
    HEADER_TOO_LARGE = (
        431,
        "The header is too large",
        "The request line and headers are too many bytes, or there are too many headers.",
    )
    REQUEST_TIMEOUT = (
        408,
        "The request took too long to arrive",
        "The header, or more of the body, did not arrive in time; the connection is closed.",
    )
    TOO_MANY_CONNECTIONS = (
        503,
        "Too many connections",
        "The service, or the caller's address, has too many connections; retry later.",
    )
    TOO_MANY_FAILURES = (
        429,
        "Too many invalid keys",
        "The caller's address sent too many invalid keys; retry after 'Retry-After' seconds.",
    )
    LIMIT = (
        422,
        "A limit of this service is exceeded",
        (
            "The graph, the mesh or the problem is larger than this service allows; 'limit' is the "
            "largest value and 'limit_name' its setting."
        ),
    )
    DIGEST_MISMATCH = (
        422,
        "The digest does not match",
        "The digest in the path must be the sha256 of the graph's bytes, before Content-Encoding.",
    )
    IDEMPOTENCY_KEY_REUSED = (
        422,
        "The Idempotency-Key was used for another request",
        "A key identifies one request for 24 hours; use a new one for each request.",
    )
    PRECONDITION_FAILED = (
        412,
        "The resource has changed",
        "If-Match or If-None-Match does not match the resource; get it again.",
    )
    TOPOLOGY_PRESET = (
        409,
        "The topology is built in",
        "Built-in topologies cannot be changed; store yours under another name.",
    )
    PLAN = (
        422,
        "The plan does not allow this",
        "The plan is infeasible, of another graph, or cannot be expressed in the target.",
    )
    UNAUTHENTICATED = (
        401,
        "An API key is required",
        "Send 'Authorization: Bearer KEY' with a valid key of `autoshard keys create`.",
    )
    FORBIDDEN = (
        403,
        "Not allowed",
        (
            "The key lacks the scope that 'detail' names; or, without keys, the request comes from "
            "another site's page, by its Host or Origin."
        ),
    )
    NOT_FOUND = (
        404,
        "Not found",
        "There is no such route, plan or job; finished jobs are deleted after a while.",
    )
    GRAPH_UNKNOWN = (
        404,
        "The graph is not stored",
        "Upload the graph with PUT /v1/graphs/{digest}, then repeat the request.",
    )
    METHOD_NOT_ALLOWED = (405, "Method not allowed", "The route exists; 'Allow' lists its methods.")
    TOO_MANY_JOBS = (429, "Too many jobs", "The queue is full; retry after 'Retry-After' seconds.")
    TOO_MANY_STREAMS = (
        429,
        "Too many event streams",
        "The caller has 'limit' event streams open at this server; close one, or poll the job.",
    )
    TOO_MANY_WAITS = (
        429,
        "Too many waiting requests",
        "'limit' requests wait for jobs with `Prefer: wait=N`; poll the job without it.",
    )
    TOO_MANY_PARSES = (
        429,
        "Too many graphs to read",
        "'limit' graphs or plans wait to be read; retry after 'Retry-After' seconds.",
    )
    UNAVAILABLE = (503, "Not ready", "The service is shutting down, or cannot reach its database.")
    JOB_NOT_FINISHED = (
        409,
        "The job is not finished",
        "A queued or running job cannot be deleted; cancel it first.",
    )
    CANCELLED = (409, "The job was cancelled", "The job was cancelled before it was finished.")
    OTHER_RELEASE = (
        409,
        "The job belongs to another release",
        (
            "Several releases share a database, as during an upgrade. Either the job was accepted "
            "by another release than the one that runs it: repeat the request. Or only a newer "
            "release can read the result."
        ),
    )
    SOLVER_CRASHED = (
        500,
        "The solver process died",
        "The process of the job ended without a result, often for lack of memory.",
    )
    DEADLINE = (
        504,
        "The job took too long",
        "The job, including parsing and formulation, exceeded this service's time limit.",
    )
    OUT_OF_MEMORY = (
        500,
        "The job needs too much memory",
        "Solving needed more memory than one job may use, so it was stopped.",
    )
    STORE_FULL = (
        507,
        "The database is full",
        (
            "The disk of the service's database is full, and nothing was written; retry after its "
            "operator has freed space."
        ),
    )
    NOT_INSTALLED = (
        501,
        "A package is not installed",
        "The service has been installed without an extra; 'detail' names it, and another way.",
    )
    INTERNAL = (
        500,
        "Internal error",
        "A bug of the service; its log has the details under the id of the request or job.",
    )
    HTTP = (400, "Request refused", "Another HTTP error; see its status.")

    def __init__(self, status: int, title: str, meaning: str) -> None:
        self.status = status
        self.title = title
        self.meaning = meaning

    @property
    def slug(self) -> str:
        """Stable name, the end of the `type` URI."""
        return self.name.lower().replace("_", "-")

    @property
    def uri(self) -> str:
        """The `type` member."""
        return TYPE_PREFIX + self.slug


class ServerError(Exception):
    """An error with a problem document as its HTTP response.

    Args:
        kind: of the problem.
        detail: the error of this request, and a remedy.
        headers: HTTP headers of the response, such as Retry-After.
        extensions: further members of the problem document.
    """

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        extensions: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.headers = dict(headers or {})
        self.extensions = dict(extensions or {})


def limit_error(
    kind: ProblemType,
    detail: str,
    setting: str,
    limit: float,
    headers: Mapping[str, str] | None = None,
) -> ServerError:
    """The error of a request that exceeds a limit.

    Args:
        kind: of the problem.
        detail: the excess; the setting's name is appended.
        setting: field of `Settings` with the limit.
        limit: its value.
        headers: HTTP headers of the response.
    """
    name = limit_name(setting)
    extensions = {"limit": limit, "limit_name": name}
    return ServerError(kind, f"{detail} ({name})", headers=headers, extensions=extensions)


EXCEPTION_PROBLEMS: Mapping[type[Exception], ProblemType] = {
    errors.ArchiveError: ProblemType.ARCHIVE,
    errors.SchemaError: ProblemType.PROGRAM,
    errors.UnsupportedError: ProblemType.UNSUPPORTED,
    errors.GraphError: ProblemType.GRAPH,
    errors.MeshError: ProblemType.MESH,
    errors.OptionError: ProblemType.OPTIONS,
    errors.PlanError: ProblemType.PLAN,
    errors.InputError: ProblemType.INPUT,
    StoreFullError: ProblemType.STORE_FULL,
    StoreUnavailableError: ProblemType.UNAVAILABLE,
}
"""Problem type of each of the library's exceptions; that of the nearest base class applies."""


def problem_type_of(error: Exception) -> ProblemType:
    """The kind of problem of an exception; INTERNAL for unexpected ones."""
    if isinstance(error, ServerError):
        return error.kind
    found = (EXCEPTION_PROBLEMS.get(base) for base in type(error).__mro__)
    return next((kind for kind in found if kind is not None), ProblemType.INTERNAL)


def problem_document(
    kind: ProblemType, detail: str, *, status: int | None = None, **extensions: Any
) -> dict[str, Any]:
    """Problem details as a JSON object.

    Args:
        kind: of the problem.
        detail: the error of this request, and a remedy.
        status: HTTP status, if it differs from that of the kind.
        extensions: further members.
    """
    return {
        "type": kind.uri,
        "title": kind.title,
        "status": status or kind.status,
        "detail": detail,
        **extensions,
    }


_EXHAUSTED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE})
"""Errors of a machine that lacks something for a while."""


def problem_of(error: Exception) -> dict[str, Any]:
    """The problem details of an exception; reveals nothing about an internal one."""
    kind = problem_type_of(error)
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        detail = "the service's machine lacks disk space or open files; retry later"
        return problem_document(ProblemType.UNAVAILABLE, detail)
    if isinstance(error, ServerError):
        return problem_document(kind, str(error), **error.extensions)
    if kind is ProblemType.INTERNAL:
        return problem_document(kind, "an unexpected error; the service's log has the details")
    if isinstance(error, StoreUnavailableError):
        # Its message has the address of the database, which is for the operator only.
        return problem_document(kind, kind.meaning)
    return problem_document(kind, str(error))


def server_error_of(problem: Mapping[str, Any]) -> ServerError:
    """The error of problem details that another process has made with `problem_of`."""
    standard = {"type", "title", "status", "detail"}
    others = {name: problem[name] for name in problem.keys() - standard}
    return ServerError(_KINDS[problem["type"]], problem["detail"], extensions=others)


_KINDS: Mapping[str, ProblemType] = {kind.uri: kind for kind in ProblemType}
