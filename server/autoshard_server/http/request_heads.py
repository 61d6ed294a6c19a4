"""Heads of requests that two programs could read differently, such as a proxy and this server.

What one takes for the body is then a request of its own to the other, or they disagree about the
caller or the site. Such requests are refused before the application sees them.
"""

from collections import Counter
from collections.abc import Sequence

from autoshard_server.problems import ProblemType, ServerError

_VERSIONS = ("1.0", "1.1")

_SINGLE = (
    *(b"authorization", b"content-encoding", b"content-length", b"content-type"),
    *(b"idempotency-key", b"last-event-id", b"origin"),
)
"""Headers of which only one may be sent: of several, each program takes another."""


def head_fault(
    version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> ServerError | None:
    """The reason why a request is refused; None if all programs read it alike.

    Args:
        version: of HTTP, such as 1.1.
        url: target of the request line.
        headers: with names in lower case.
    """
    if version not in _VERSIONS:
        return _refused(f"HTTP/{version} is not supported; send HTTP/1.1")
    counts = Counter(name for name, _ in headers)
    twice = next((name.decode() for name in _SINGLE if counts[name] > 1), None)
    if twice is not None:
        return _refused(f"the request has {twice!r} more than once")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version != "1.1"):
        return _refused("the only Transfer-Encoding is 'chunked', once, of a request of HTTP/1.1")
    if counts[b"host"] > 1 or (counts[b"host"] == 0 and version == "1.1"):
        detail = f"the request has {counts[b'host']} Host headers in place of one"
        return ServerError(ProblemType.HOST, detail)
    authority, _ = split_target(url)
    hosts = {value.strip().lower() for name, value in headers if name == b"host"}
    if authority and {authority.lower()} != hosts:
        return ServerError(ProblemType.HOST, "the Host is not that of the request line")
    return None


def split_target(url: bytes) -> tuple[bytes, bytes]:
    """The authority of a request's target, empty if it has none, and the rest of the target.

    A target is a path, or a whole address (RFC 9112, section 3.2.2).
    """
    scheme, separator, rest = url.partition(b"://")
    if url.startswith(b"/") or not separator or not scheme.isalpha():
        return b"", url
    authority, slash, path = rest.partition(b"/")
    return authority, slash + path or b"/"


def _refused(detail: str) -> ServerError:
    return ServerError(ProblemType.HTTP, detail)
