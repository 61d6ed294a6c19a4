"""Pages for browsers: the API's documentation, and the kinds of problems.

Everything is served from this machine. The files of Swagger UI come from the package
`fastapi-swagger`; the policy of each page allows nothing else.
"""

import html
from importlib import resources

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from autoshard_server.http.parameters import JSON
from autoshard_server.problems import PROBLEMS_PATH, ProblemType

router = APIRouter(include_in_schema=False)

_FILES = {
    "favicon-32x32.png": "image/png",
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
"""Media types of the files of Swagger UI."""

_START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  layout: "BaseLayout",
  presets: [SwaggerUIBundle.presets.apis],
});
"""
"""A file of its own, since the policy allows no scripts within the page."""

_DOCS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>autoshard</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
"""Addresses are relative, so that the page also works under a path of a reverse proxy."""

_PROBLEMS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Problems - autoshard</title>
</head>
<body>
<h1>Problems</h1>
<p>Every error of this service is <code>application/problem+json</code> (RFC 9457). Its
<code>type</code> ends in a name of this page, and its <code>detail</code> describes the error of
the request.</p>
{sections}
</body>
</html>
"""

_SECTION = '<h2 id="{slug}">{slug}</h2>\n<p>{status}, “{title}”. {meaning}</p>'

_CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

_DOCS_POLICY = (
    f"{_CLOSED}; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
)
"""Images of Swagger UI are data within its style sheet; it reads the specification, and requests
that users try go to this service."""


@router.get("/openapi.json")
def get_specification(request: Request) -> Response:
    """The specification of the API, which is made once."""
    return Response(request.app.state.specification(), media_type=JSON)


@router.get("/docs")
def get_docs() -> Response:
    """The documentation of the API, with Swagger UI."""
    return _page(_DOCS, _DOCS_POLICY)


@router.get("/docs/{name}")
def get_docs_file(name: str, request: Request) -> Response:
    """A file of the documentation."""
    headers = {"Cache-Control": "public, max-age=3600", "X-Content-Type-Options": "nosniff"}
    if name == "start.js":
        return Response(_START, headers=headers, media_type="text/javascript")
    if name not in _FILES:
        raise HTTPException(ProblemType.NOT_FOUND.status, f"no file {request.url.path}")
    content = (resources.files("fastapi_swagger.resources") / name).read_bytes()
    return Response(content, headers=headers, media_type=_FILES[name])


@router.get(PROBLEMS_PATH)
def get_problems() -> Response:
    """The kinds of problems, one section each; the `type` of a problem is the address of one."""
    sections = (
        _SECTION.format(
            slug=kind.slug,
            status=kind.status,
            title=html.escape(kind.title),
            meaning=html.escape(kind.meaning),
        )
        for kind in ProblemType
    )
    return _page(_PROBLEMS.format(sections="\n".join(sections)), _CLOSED)


def _page(text: str, policy: str) -> Response:
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(text, headers=headers, media_type="text/html; charset=utf-8")
