"""Uploads a graph, plans it, looks the plan up and reads it, with a generated client.

Arguments: address of a service, a key, file of a graph. Prints the plan's id.
"""

import hashlib
import sys
from io import BytesIO
from pathlib import Path

from generated_client import AuthenticatedClient
from generated_client.api.graphs import head_graph, put_graph
from generated_client.api.jobs import get_job, list_jobs
from generated_client.api.plans import create_plan, get_plan, list_plans, look_up_plan
from generated_client.models import (
    CreatePlanFilesBody,
    CreatePlanOfModelRequest,
    CreatePlanRequest,
    JobPage,
    KnownPlan,
    LookUpPlanRequest,
    MeshShorthand,
    Plan,
    PlanPage,
    Problem,
)
from generated_client.types import File


def main(address: str, key: str, graph: bytes) -> str:
    digest = hashlib.sha256(graph).hexdigest()
    mesh = MeshShorthand(shape=[2, 4])
    with AuthenticatedClient(address, key, raise_on_unexpected_status=True) as client:
        put_graph.sync(digest, client=client, body=File(BytesIO(graph)))
        assert head_graph.sync_detailed(digest, client=client).status_code == 200
        request = CreatePlanOfModelRequest(graph_sha256=digest, mesh=mesh)
        made = create_plan.sync(client=client, body=request, prefer="wait=60")
        assert isinstance(made, Plan)
        parts = CreatePlanFilesBody(
            graph=File(BytesIO(graph), file_name="graph.pt2"), request=CreatePlanRequest(mesh=mesh)
        )
        uploaded = create_plan.sync(client=client, body=parts, prefer="wait=60")
        assert isinstance(uploaded, Plan)
        assert uploaded.id == made.id
        lookup = LookUpPlanRequest(graph_sha256=digest, mesh=mesh)
        found = look_up_plan.sync(client=client, body=lookup)
        assert isinstance(found, KnownPlan)
        read = get_plan.sync(found.id, client=client)
        assert isinstance(read, Plan)
        assert read.to_dict() == made.to_dict()
        check_lists(client, found.id)
        unknown = get_plan.sync("0" * 64, client=client)
        assert isinstance(unknown, Problem)
        assert (unknown.status, unknown.title) == (404, "Not found")
    return found.id


def check_lists(client: AuthenticatedClient, plan_id: str) -> None:
    plans = list_plans.sync(client=client, page_size=1)
    assert isinstance(plans, PlanPage)
    assert plans.plans[0].id == plan_id
    jobs = list_jobs.sync(client=client, page_size=1)
    assert isinstance(jobs, JobPage)
    job = get_job.sync(jobs.jobs[0].id, client=client)
    assert job is not None
    assert job.to_dict()["result"]["id"] == plan_id


if __name__ == "__main__":
    print(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_bytes()))  # noqa: T201  read by the test
