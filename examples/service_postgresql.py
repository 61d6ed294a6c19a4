"""Run the service on PostgreSQL: one server that accepts requests, one worker that solves them.

Run it: AUTOSHARD_STORE_URL=postgresql+psycopg://USER@HOST/DB python examples/service_postgresql.py
"""

import os
import subprocess
import sys
import time

import torch

from autoshard import Client, export_model
from autoshard.errors import ServiceUnavailableError

PORT = os.environ.get("PORT", "8000")
COMMAND = sys.executable, "-m", "autoshard.cli"


def main() -> None:
    """Plan a small model; the second request is answered from the database."""
    if not os.environ.get("AUTOSHARD_STORE_URL", "").startswith("postgresql"):
        raise SystemExit("AUTOSHARD_STORE_URL must be the address of a PostgreSQL database")
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256))
    archive = export_model(model, (torch.zeros(64, 256),))
    # The server solves nothing itself. Both may run on any number of hosts.
    only_accepts = {**os.environ, "AUTOSHARD_NUM_WORKERS": "0"}
    processes = [
        subprocess.Popen([*COMMAND, "serve", "--port", PORT], env=only_accepts),
        subprocess.Popen([*COMMAND, "worker", "--workers", "1"]),
    ]
    try:
        with Client(f"http://127.0.0.1:{PORT}", cache=False) as client:
            wait_for(client)
            for _ in range(2):
                result = client.request_plan(archive, mesh=(2, 4))
                print(result.plan.id[:12], "cached" if result.cached else "solved")
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def wait_for(client: Client) -> None:
    """Wait until the service is ready."""
    for _ in range(60):
        try:
            print(client.health())
        except ServiceUnavailableError:
            time.sleep(1)
        else:
            return


if __name__ == "__main__":
    main()
