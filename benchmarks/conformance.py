"""Conformance of the API to its specification: schemathesis makes requests and checks responses.

`python -m benchmarks.conformance` makes 2,000 examples and more, and writes the result into
docs/reliability.md. The service runs with API keys, and has one graph and its plan.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx2
import torch

from autoshard.cli.commands.demo import service
from autoshard.graph import export_model
from autoshard_server import Settings
from autoshard_server.store.database import Stores
from benchmarks.document import caption, write_table

_ROOT = Path(__file__).parent.parent
_DOCUMENT = _ROOT / "docs" / "reliability.md"
_PHASES = "examples,coverage,fuzzing,stateful"

_NOT_CHECKED = "positive_data_acceptance"
"""This check does not apply: a schema cannot require a digest to be that of the body."""


@dataclass(frozen=True, slots=True)
class Conformance:
    """Result of schemathesis.

    Attributes:
        status: its exit status; 0 without findings.
        num_cases: number of requests.
        num_operations: number of tested operations and of all.
        text: its output.
    """

    status: int
    num_cases: int
    num_operations: str
    text: str


def conform(max_examples: int, *, phases: str = _PHASES, seed: int = 1) -> Conformance:
    """Test a new service with a number of examples for each operation."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        # The database of `service`.
        token = _key(f"sqlite:///{path / 'cache.sqlite3'}")
        with service(path, "--auth") as url:
            known = _known(url, token)
            flags = [f"--max-examples={max_examples}", "--phases", phases, "--seed", str(seed)]
            return _run(url, token, known, flags)


def _key(store: str) -> str:
    stores = Stores(Settings(store_url=store))
    try:
        return stores.api_keys.create("conformance", ["admin", "metrics"])[1]
    finally:
        stores.close()


def _known(url: str, token: str) -> dict[str, str]:
    """Ids of a graph, a plan, and a job, under the names that parameters and fields have."""
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
    archive = export_model(torch.nn.Sequential(*layers), (torch.zeros(8, 16),))
    digest = hashlib.sha256(archive).hexdigest()
    request = {"graph_sha256": digest, "mesh": {"shape": [2]}, "options": {"mode": "inference"}}
    headers = {"Authorization": f"Bearer {token}", "Prefer": "wait=60"}
    with httpx2.Client(base_url=url, headers=headers, timeout=90) as http:
        http.put(f"/v1/graphs/{digest}", content=archive).raise_for_status()
        plan = http.post("/v1/plans", json=request).raise_for_status().json()["id"]
        job = http.get("/v1/jobs").raise_for_status().json()["jobs"][0]["id"]
        devices = {"graph_sha256": digest, "num_devices": 2, "options": {"mode": "inference"}}
        search = http.post("/v1/searches", json=devices).raise_for_status().headers["ETag"]
    ids = {"digest": digest, "graph_sha256": digest, "plan_id": plan, "before": plan}
    return {**ids, "after": plan, "job_id": job, "name": "h100-sxm", "search_id": search.strip('"')}


def _run(url: str, token: str, known: dict[str, str], flags: list[str]) -> Conformance:
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "--no-color", "run"),
        *(str(_ROOT / "openapi" / "openapi.json"), "--url", url),
        *("-H", f"Authorization: Bearer {token}"),
        *flags,
        *("--exclude-checks", _NOT_CHECKED, "--request-timeout", "60"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        "SCHEMATHESIS_HOOKS": "benchmarks.conformance_hooks",
        "AUTOSHARD_KNOWN": json.dumps(known),
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603  a constant command
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    text = done.stdout + done.stderr
    cases = re.search(r"([\d,]+) generated", text)
    tested = re.search(r"Selected: (\S+)", text)
    return Conformance(
        status=done.returncode,
        num_cases=int(cases[1].replace(",", "")) if cases else 0,
        num_operations=tested[1] if tested else "0",
        text=text,
    )


def main() -> int:
    """Run, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("--examples", type=int, default=40, help="for each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--document", type=Path, default=_DOCUMENT)
    options = parser.parse_args()
    head = caption(f"schemathesis, {options.examples} examples an operation, seed {options.seed}")
    found = conform(options.examples, seed=options.seed)
    outcome = "none" if found.status == 0 else "**some, see the output of the command**"
    table = (
        "| operations | requests | server errors and responses that do not conform |\n"
        "|---|---|---|\n"
        f"| {found.num_operations} | {found.num_cases:,} | {outcome} |"
    )
    print(found.text)
    if options.document.exists():
        write_table(options.document, "conformance", f"{head}\n\n{table}")
    return found.status


if __name__ == "__main__":
    sys.exit(main())
