"""Records the answers that the specification shows as examples.

`python -m benchmarks.examples` starts a service, has a layer planned, and writes the answers by the
name of their schema. They are recorded again after documents have changed;
tests/server/test_generated_files.py compares them with the schemas.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx2
import torch

from autoshard.cli.commands.demo import service
from autoshard.graph import export_model
from autoshard_server.http import examples

_FILE = Path(examples.__file__).with_name(examples.ANSWERS_FILE)


class _Layer(torch.nn.Module):
    """A matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4096, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        product: torch.Tensor = self.linear(x)
        return product


def record(url: str, graph: bytes) -> dict[str, Any]:
    """Answers of a new service, by the name of their schema."""
    with httpx2.Client(base_url=url, headers={"Prefer": "wait=60"}, timeout=90) as http:

        def ask(method: str, path: str, **options: Any) -> Any:
            return http.request(method, path, **options).raise_for_status().json()

        digest = hashlib.sha256(graph).hexdigest()
        found = {"UploadedGraph": ask("PUT", f"/v1/graphs/{digest}", content=graph)}
        found["GraphDocument"] = ask("GET", f"/v1/graphs/{digest}")
        program = {"graph_sha256": digest, "options": {"mode": "inference"}}
        request = {**program, "mesh": {"shape": [2], "topology": "h100-sxm"}}
        no_wait = {"Prefer": "wait=0"}
        found["JobDocument 202"] = ask("POST", "/v1/plans", json=request, headers=no_wait)
        found["Plan"] = plan = ask("POST", "/v1/plans", json=request)
        found["PlanPage"] = ask("GET", "/v1/plans")
        found["KnownPlan"] = ask("POST", "/v1/plans:lookup", json=request)
        ask("POST", "/v1/plans", json={**request, "validate_only": True})
        found["JobPage"] = jobs = ask("GET", "/v1/jobs", params={"page_size": 1})
        found["JobDocument"] = ask("GET", f"/v1/jobs/{jobs['jobs'][0]['id']}")
        wider = ask("POST", "/v1/plans", json={**request, "mesh": {"shape": [4]}})
        pair = {"before": plan["id"], "after": wider["id"]}
        found["PlanDifference"] = ask("POST", "/v1/plans:compare", json=pair)
        choice = {"name": "linear"}
        found["Explanation"] = ask("POST", f"/v1/plans/{plan['id']}:explain", json=choice)
        search = {**program, "num_devices": 2, "topology": "h100-sxm"}
        found["MeshSearch"] = ask("POST", "/v1/searches", json=search)
        covered = {"graph_sha256": digest}
        found["Coverage"] = ask("POST", "/v1/operators:coverage", json=covered)
        found["Topology"] = topology = ask("GET", "/v1/topologies/h100-sxm")
        ours = {**topology, "name": "my-cluster"}
        found["StoredTopologyEntry"] = ask("PUT", "/v1/topologies/my-cluster", json=ours)
        found["Topologies"] = ask("GET", "/v1/topologies")
        found["AuditPage"] = ask("GET", "/v1/audit", params={"page_size": 2})
        found["Alive"] = ask("GET", "/livez")
        found["Versions"] = ask("GET", "/version")
    return found


def main() -> int:
    """Record the answers."""
    with torch.device("meta"):
        graph = export_model(_Layer(), (torch.zeros(8, 4096),))
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        found = record(url, graph)
    _FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
