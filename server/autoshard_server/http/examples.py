"""Examples in the specification, and descriptions of its tags.

The answers are those of a service, which `python -m benchmarks.examples` records.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from autoshard.mesh import get_topology, topology_to_json

DIGEST = "0" * 64
REQUEST_ID = "5f0c6a3e1d2b4c7f8a9b0c1d2e3f4a5b"

_MESH = {"shape": [2, 4], "topology": "h100-sxm"}

_REQUESTS: Mapping[str, Any] = {
    "ComparePlansRequest": {"before": DIGEST, "after": "1" * 64},
    "CoverageRequest": {"graph_sha256": DIGEST, "mesh": _MESH},
    "CreatePlanOfModelRequest": {"graph_sha256": DIGEST, "mesh": _MESH},
    "CreatePlanRequest": {"mesh": _MESH, "options": {"mode": "training"}},
    "ExplainRequest": {"name": "linear"},
    "LookUpPlanRequest": {"graph_sha256": DIGEST, "mesh": _MESH},
    "SearchRequest": {"graph_sha256": DIGEST, "num_devices": 8, "topology": "h100-sxm"},
    "TopologyInput": {
        **json.loads(topology_to_json(get_topology("h100-sxm"), indent=None)),
        "name": "my-cluster",
    },
}

ANSWERS_FILE = "answers.json"

EXAMPLES: Mapping[str, Any] = {
    **_REQUESTS,
    **json.loads((resources.files(__package__) / ANSWERS_FILE).read_text()),
}
"""Documents by the name of their schema, or by that and the status of the response."""

STREAM_EXAMPLE = """id: 1
event: state
data: {"number":1,"kind":"state","created_at":"2026-11-20T09:30:00Z","data":{"state":"queued"}}

"""

PATH_EXAMPLES: Mapping[str, str] = {
    "digest": DIGEST,
    "job_id": REQUEST_ID,
    "name": "h100-sxm",
    "plan_id": DIGEST,
    "search_id": DIGEST,
}
"""Values of the parameters of paths, by their name."""

TAGS: Mapping[str, str] = {
    "plans": "Sharding plans: create, look up, list, read, delete, explain, compare, export, "
    "trace them.",
    "graphs": "Exported programs: upload, read and delete them, list the operators that can be "
    "sharded.",
    "searches": "The best mesh for a graph: search for it, read and delete the ranking.",
    "jobs": "Computations that take longer than their request: list, read, follow, cancel and "
    "delete them.",
    "topologies": "Devices and links that a mesh can name: list, read, store and delete them.",
    "audit": "Who changed what in the project.",
    "health": "Health, versions and metrics, for operators.",
}
"""Descriptions of the tags, in the order in which they are shown."""
