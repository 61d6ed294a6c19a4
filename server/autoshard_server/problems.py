"""What can go wrong, as RFC 9457 problem details: one table from exception to answer.

Imported by the solver processes too, so it needs nothing of the web framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard import errors
from autoshard_solver_cache import StoreFullError, StoreUnavailableError

PROBLEM_MEDIA_TYPE = "application/problem+json"

TYPE_PREFIX = "https://autoshard.readthedocs.io/en/stable/problems.html#"
"""Start of every problem `type`; the slug behind it never changes."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of problem.

    Attributes:
        slug: stable name, the end of the `type` URI.
        status: HTTP status.
        title: the same for every problem of the type.
        meaning: for people, when it happens and what to do.
    """

    slug: str
    status: int
    title: str
    meaning: str

    @property
    def uri(self) -> str:
        """The `type` member."""
        return TYPE_PREFIX + self.slug


class ServerError(Exception):
    """An answer of the service that is no plan.

    Args:
        kind: which problem.
        detail: what is wrong with this request, and the way out.
        headers: HTTP headers of the answer, such as Retry-After.
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


ARCHIVE = ProblemType(
    "archive",
    400,
    "The graph cannot be read",
    "The part 'graph' is not a readable .pt2 archive or model.json, or exceeds a limit.",
)
PROGRAM = ProblemType(
    "program",
    422,
    "The program is not understood",
    "The archive's model.json is not an exported program of a version that we know.",
)
UNSUPPORTED = ProblemType(
    "unsupported",
    422,
    "The program uses something without a rule",
    "An operator or a feature of the exported program cannot be sharded yet.",
)
GRAPH = ProblemType(
    "graph",
    422,
    "The graph cannot be planned",
    "The program was read, but cannot be planned as asked.",
)
MESH = ProblemType(
    "mesh",
    422,
    "The mesh is impossible",
    "Shape, topology, bandwidths or backend are wrong or contradict each other.",
)
OPTIONS = ProblemType(
    "options",
    422,
    "The options are impossible",
    "Planning options contradict each other, the graph or a limit of this service.",
)
INPUT = ProblemType(
    "input", 422, "The input is wrong", "Something else that was handed in cannot be used."
)
REQUEST = ProblemType(
    "request",
    422,
    "The request is not valid",
    "A field is missing, unknown or of the wrong type; 'errors' points at each.",
)
MULTIPART = ProblemType(
    "multipart",
    400,
    "The form cannot be read",
    "The body is not the multipart/form-data that this route takes.",
)
MEDIA_TYPE = ProblemType(
    "media-type",
    415,
    "Unsupported media type",
    "This route takes multipart/form-data with the parts 'graph' and 'request'.",
)
TOO_LARGE = ProblemType(
    "too-large",
    413,
    "The body is too large",
    "The body exceeds the limit that 'limit' gives in bytes; export on the meta device.",
)
LIMIT = ProblemType(
    "limit",
    422,
    "A limit of this service is exceeded",
    "The graph, the mesh or the problem is larger than this service allows; 'limit' says by "
    "how much, 'limit_name' which setting decides.",
)
CODING = ProblemType(
    "content-coding",
    415,
    "The coding of the body is not known, or wrong",
    "Content-Encoding may be gzip, zstd or identity, and the body must be what it says.",
)
CONTENT = ProblemType(
    "digest-mismatch",
    422,
    "The bytes are not those of the digest",
    "The path names the sha256 of the graph's bytes, before any Content-Encoding.",
)
GRAPH_UNKNOWN = ProblemType(
    "graph-unknown",
    404,
    "The graph is not stored here",
    "Send the graph with PUT /v1/graphs/{digest}, then ask again.",
)
UNAUTHENTICATED = ProblemType(
    "unauthenticated",
    401,
    "An API key is needed",
    "Send 'Authorization: Bearer KEY' with a key of `autoshard keys create` that is still valid.",
)
FORBIDDEN = ProblemType(
    "forbidden",
    403,
    "The API key does not allow this",
    "The key lacks the scope that 'detail' names; or, where no key is needed, the request is that "
    "of another site's page, by its Host or Origin.",
)
KEY_REUSED = ProblemType(
    "idempotency-key-reused",
    422,
    "The Idempotency-Key was used for another request",
    "A key stands for one request for 24 hours; make a new one for each request.",
)
PRECONDITION = ProblemType(
    "precondition-failed",
    412,
    "It is not what you have seen",
    "If-Match or If-None-Match names what may be changed, and something else is there; look again.",
)
PRESET = ProblemType(
    "topology-preset",
    409,
    "The topology is built in",
    "Names of built-in topologies always mean those; store yours under another name.",
)
NO_PLAN = ProblemType(
    "plan",
    422,
    "The plan does not allow this",
    "The plan found nothing, is of another graph, or cannot be expressed as asked.",
)
NOT_FOUND = ProblemType(
    "not-found", 404, "Not found", "There is no such route, plan or job; old jobs are forgotten."
)
METHOD = ProblemType(
    "method-not-allowed", 405, "Method not allowed", "The route exists; 'Allow' says for what."
)
TOO_MANY = ProblemType(
    "too-many-jobs",
    429,
    "Too many jobs are waiting",
    "The queue is full; come back after 'Retry-After' seconds.",
)
UNAVAILABLE = ProblemType(
    "unavailable",
    503,
    "Not ready",
    "The service is shutting down, or cannot reach its store.",
)
CANCELLED = ProblemType(
    "cancelled", 409, "The job was cancelled", "Somebody cancelled the job before it was done."
)
OTHER_RELEASE = ProblemType(
    "other-release",
    409,
    "The job was asked of another release",
    "Several releases share a database, as during an upgrade: the one that runs jobs is not the "
    "one that took this one, so ask again; or only a newer one knows what was made.",
)
CRASHED = ProblemType(
    "solver-crashed",
    500,
    "The solver process died",
    "The process that solved the job ended without an answer, often for lack of memory.",
)
DEADLINE = ProblemType(
    "deadline",
    504,
    "The job took too long",
    "The whole job, reading and formulating included, exceeded this service's limit.",
)
MEMORY = ProblemType(
    "out-of-memory",
    500,
    "The job needs too much memory",
    "Solving needed more memory than one job may have here, and was stopped; nothing else was.",
)
STORE_FULL = ProblemType(
    "store-full",
    507,
    "The store is full",
    "The disk of the service's database is full, and nothing was written; "
    "come back when its operator has made room.",
)
INTERNAL = ProblemType(
    "internal",
    500,
    "Internal error",
    "A bug of the service; its log has the details under the request's or the job's id.",
)
HTTP = ProblemType("http", 400, "Request refused", "Another HTTP error; see its status.")

PROBLEM_TYPES = (
    ARCHIVE,
    PROGRAM,
    UNSUPPORTED,
    GRAPH,
    MESH,
    OPTIONS,
    INPUT,
    REQUEST,
    MULTIPART,
    MEDIA_TYPE,
    CODING,
    TOO_LARGE,
    LIMIT,
    CONTENT,
    KEY_REUSED,
    PRECONDITION,
    PRESET,
    NO_PLAN,
    UNAUTHENTICATED,
    FORBIDDEN,
    NOT_FOUND,
    GRAPH_UNKNOWN,
    METHOD,
    TOO_MANY,
    UNAVAILABLE,
    CANCELLED,
    OTHER_RELEASE,
    CRASHED,
    DEADLINE,
    MEMORY,
    STORE_FULL,
    INTERNAL,
    HTTP,
)
"""Every problem that the service can answer with."""

EXCEPTION_PROBLEMS: Mapping[type[Exception], ProblemType] = {
    errors.ArchiveError: ARCHIVE,
    errors.SchemaError: PROGRAM,
    errors.UnsupportedError: UNSUPPORTED,
    errors.GraphError: GRAPH,
    errors.MeshError: MESH,
    errors.OptionError: OPTIONS,
    errors.PlanError: NO_PLAN,
    errors.InputError: INPUT,
    StoreFullError: STORE_FULL,
    StoreUnavailableError: UNAVAILABLE,
}
"""What the library raises, and what the service answers; the nearest base class counts."""


def problem_type_of(error: Exception) -> ProblemType:
    """The kind of problem that an exception is; INTERNAL where it is none of ours."""
    if isinstance(error, ServerError):
        return error.kind
    found = (EXCEPTION_PROBLEMS.get(base) for base in type(error).__mro__)
    return next((kind for kind in found if kind is not None), INTERNAL)


def problem_document(
    kind: ProblemType, detail: str, *, status: int | None = None, **extensions: Any
) -> dict[str, Any]:
    """Problem details as they travel.

    Args:
        kind: which problem.
        detail: what is wrong this time, and the way out.
        status: HTTP status where it differs from the kind's own.
        extensions: further members.
    """
    return {
        "type": kind.uri,
        "title": kind.title,
        "status": status or kind.status,
        "detail": detail,
        **extensions,
    }


def problem_of(error: Exception) -> dict[str, Any]:
    """The problem details of an exception; says nothing of the inside of an internal one."""
    kind = problem_type_of(error)
    if kind is INTERNAL and not isinstance(error, ServerError):
        return problem_document(kind, "an unexpected error; the service's log has the details")
    if isinstance(error, StoreUnavailableError):
        # Its text is for the operator: it says where the database is.
        return problem_document(kind, kind.meaning)
    extensions = error.extensions if isinstance(error, ServerError) else {}
    return problem_document(kind, str(error), **extensions)
