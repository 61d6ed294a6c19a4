"""Every option of a request refuses what it does not mean, by the specification itself."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from autoshard import PlanOptions

HUGE = 10**30
WRONG: dict[str, tuple[Any, ...]] = {
    "boolean": ("no", "", 1, {}, HUGE),
    "integer": ("4", "4GB", "", 2.5, HUGE, True),
    "number": ("5", "5s", "", True, -1.0),
    "string": (5, ["x"], True, 2.5, {}),
    "array": ("x", 5, True, {}, [{}]),
    "object": ("x", 5, True, [], 2.5),
    "enum": ("INVALID", "", 5, ["INVALID"], HUGE),
}


def properties(document: dict[str, Any], name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The members of a schema, each with its alternatives."""
    schemas = document["components"]["schemas"]
    for member, schema in schemas[name]["properties"].items():
        kinds = schema.get("anyOf", [schema])
        named = (kind.get("$ref", "").rsplit("/", 1)[-1] for kind in kinds)
        yield member, [schemas.get(ref, kind) for ref, kind in zip(named, kinds, strict=True)]


def wrong_values(kinds: list[dict[str, Any]]) -> list[Any]:
    """Values that no alternative of a schema takes."""
    names = ["enum" if {"enum", "const"} & {*kind} else kind["type"] for kind in kinds]
    found = [value for name in names for value in WRONG.get(name, ())]
    pairs = list(zip(names, kinds, strict=True))
    return [value for value in found if not any(takes(n, kind, value) for n, kind in pairs)]


def takes(name: str, schema: dict[str, Any], value: Any) -> bool:
    """True if a value is of the type of a schema, and so may be right."""
    types = {"boolean": bool, "integer": int, "number": int | float, "array": list, "object": dict}
    if name == "string":
        return isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
    if name not in types or isinstance(value, bool) != (name == "boolean"):
        return False
    return isinstance(value, types[name]) and value not in (HUGE, -1.0, [{}])


@pytest.mark.parametrize("request_kind", ["plan", "search"])
def test_options_of_planning(service: Any, graph: bytes, request_kind: str) -> None:
    document = service.http.get("/openapi.json").json()
    known = document["components"]["schemas"]
    name = next(name for name in ("PlanOptionsInput", "PlanOptions") if name in known)
    members = dict(properties(document, name))
    assert members.keys() == PlanOptions.model_fields.keys()
    for member, kinds in members.items():
        values = wrong_values(kinds)
        assert len(values) >= 3, member
        for value in values:
            options = {member: value}
            if request_kind == "plan":
                answer = service.post(graph, {"mesh": {"shape": [2, 2]}, "options": options})
            else:
                asked = {"graph_sha256": "0" * 64, "num_devices": 4, "options": options}
                answer = service.http.post("/v1/searches", json=asked)
            assert answer.status_code in {400, 422}, (member, value)
            assert member in answer.text, (member, value, answer.text)


def test_shapes_and_links_of_meshes(service: Any, graph: bytes) -> None:
    document = service.http.get("/openapi.json").json()
    for member, kinds in properties(document, "MeshShorthand"):
        values = wrong_values(kinds)
        assert len(values) >= 3, member
        for value in values:
            mesh = {"shape": [2, 2], member: value}
            answer = service.post(graph, {"mesh": mesh})
            assert answer.status_code in {400, 422}, (member, value)
            assert member in answer.text or "axes" in answer.text, (member, value, answer.text)
