"""What routes take from paths, queries and the application."""

from typing import Annotated, cast

from fastapi import Depends, Path, Request

from autoshard_server.answering.service import Service
from autoshard_server.http import methods  # noqa: F401  registers the kind of path that routes have


def _service(request: Request) -> Service:
    return cast("Service", request.app.state.service)


ServiceHere = Annotated[Service, Depends(_service)]
PlanId = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="id of a plan")]
GraphDigest = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="sha256 of the graph's bytes, in hex")
]
JobId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="id of a job")]
