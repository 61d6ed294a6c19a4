"""Which methods a path knows, over all routes: frameworks name those of the first one only."""

from collections.abc import Iterable

from fastapi import APIRouter
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import Match
from starlette.types import Scope


class _Segment(Convertor[str]):
    """One segment of a path, without the verb of a custom method behind it."""

    regex = "[^/:]+"

    def convert(self, value: str) -> str:
        """The segment as it is."""
        return value

    def to_string(self, value: str) -> str:
        """The segment as it is."""
        return value


register_url_convertor("segment", _Segment())


def allowed_methods(routers: Iterable[APIRouter], scope: Scope) -> list[str]:
    """The methods of every route that matches the path of a request, sorted."""
    found: set[str] = set()
    for route in (route for router in routers for route in router.routes):
        if route.matches(scope)[0] is not Match.NONE:
            found.update(getattr(route, "methods", None) or ())
    return sorted(found)
