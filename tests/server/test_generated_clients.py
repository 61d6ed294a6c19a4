"""Clients that common generators make from the specification, against a running service.

Each client runs a program that creates, looks up and reads a plan (the folder `clients`), with a
key, as those of strangers do. Warnings of a generator are failures: it leaves out what it warns
about. All operations of the specification, and the examples of all bodies, must have their types in
each client.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve

SPECIFICATION = Path(__file__).parents[2] / "openapi" / "openapi.json"
CLIENTS = Path(__file__).parent / "clients"

PLAN_ID = re.compile("[0-9a-f]{64}")

UNREACHABLE = re.compile(
    r"EAI_AGAIN|ECONNREFUSED|ECONNRESET|EHOSTUNREACH|ENETUNREACH|ENOTFOUND|ETIMEDOUT|E[45]\d\d\b"
    r"|ERR_SOCKET_TIMEOUT|SELF_SIGNED_CERT|UNABLE_TO_GET_ISSUER_CERT|UNABLE_TO_VERIFY"
)
"""Errors of npm if it does not reach its registry, or is refused by a proxy."""


def run(*command: str | Path, folder: Path) -> str:
    """Run a program, which must succeed; its output."""
    ended = execute(*command, folder=folder)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def execute(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # Programs of this environment come first: generators run some of them.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(  # noqa: S603  ours
        [shutil.which(command[0], path=path) or command[0], *command[1:]],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def operations() -> list[dict[str, Any]]:
    paths = json.loads(SPECIFICATION.read_text())["paths"]
    return [operation for methods in paths.values() for operation in methods.values()]


@pytest.fixture
def service(start_service: Any) -> tuple[str, str]:
    """Address of a service that requires keys, and a key."""
    made = start_service(auth="required", executor=ThreadExecutor(solve))
    _, key = made.app.state.service.stores.api_keys.create("stranger", ["plan"])
    return made.url, key


@pytest.fixture(scope="module")
def archive(make_graph: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("archive") / "graph.pt2"
    path.write_bytes(make_graph(80))
    return path


@pytest.fixture(scope="module")
def python_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `generated_client`."""
    folder = tmp_path_factory.mktemp("python")
    text = run(
        *("openapi-python-client", "generate", "--path", SPECIFICATION, "--meta", "none"),
        *("--output-path", "generated_client", "--fail-on-warning"),
        folder=folder,
    )
    assert text.splitlines() == ["Generating generated_client"]
    return folder


@pytest.fixture(scope="module")
def typescript_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `schema.ts` and the program that uses it."""
    folder = tmp_path_factory.mktemp("typescript")
    shutil.copytree(CLIENTS / "typescript", folder, dirs_exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("npm", path=path) is None:
        pytest.skip("needs npm: the extra `dev` installs it, or install Node.js 20 or later")
    options = ("--prefer-offline", "--no-audit", "--no-fund")
    short = ("--fetch-retries=1", "--fetch-timeout=60000")
    installed = execute("npm", "ci", *options, *short, folder=folder)
    unreachable = UNREACHABLE.search(installed.stdout) if installed.returncode else None
    if unreachable:
        pytest.skip(f"needs the registry of npm, which cannot be reached: {unreachable[0]}")
    assert installed.returncode == 0, installed.stdout
    programs = folder / "node_modules" / ".bin"
    text = run(
        programs / "openapi-typescript", SPECIFICATION, "--output", "schema.ts", folder=folder
    )
    assert "warn" not in text.lower()
    assert "⚠" not in text
    return folder


@pytest.mark.thorough
def test_a_python_client_plans(
    service: tuple[str, str], python_client: Path, archive: Path
) -> None:
    program = shutil.copy(CLIENTS / "program.py", python_client)
    # The program is checked against the types of the client, which are the generator's own affair.
    checks = ("--strict", "--follow-imports=silent", f"--config-file={os.devnull}")
    run("mypy", *checks, program, folder=python_client)
    made = run(sys.executable, program, *service, archive, folder=python_client)
    assert PLAN_ID.fullmatch(made.strip())


def test_a_python_client_has_every_operation(
    python_client: Path, operations: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(python_client)
    models = importlib.import_module("generated_client.models")
    for operation in operations:
        (tag,) = operation["tags"]
        name = re.sub("([A-Z])", lambda found: f"_{found[1].lower()}", operation["operationId"])
        module = importlib.import_module(f"generated_client.api.{tag}.{name}")
        assert callable(module.sync_detailed)
        for schema, example in examples(operation):
            sent = getattr(models, schema).from_dict(example).to_dict()
            assert sent == json.loads(json.dumps(example).replace('Z"', '+00:00"'))


@pytest.mark.thorough
def test_a_typescript_client_plans(
    service: tuple[str, str],
    typescript_client: Path,
    archive: Path,
    operations: list[dict[str, Any]],
) -> None:
    names = json.dumps([operation["operationId"] for operation in operations])
    lines = [
        'import type { components, operations } from "./schema.js";',
        'type Schemas = components["schemas"];',
        f"export const names: (keyof operations)[] = {names};",
    ]
    found = (example for operation in operations for example in examples(operation))
    for number, (schema, example) in enumerate(found):
        lines.append(f'const _{number}: Schemas["{schema}"] = {json.dumps(example)};')
    (typescript_client / "examples.ts").write_text("\n".join(lines))
    compiler = typescript_client / "node_modules" / ".bin" / "tsc"
    assert not run(compiler, folder=typescript_client)
    made = run("node", "built/program.js", *service, archive, folder=typescript_client)
    assert PLAN_ID.fullmatch(made.strip())


def examples(operation: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names of schemas, and examples, of the JSON bodies: request and successful responses."""
    answers = [answer for status, answer in operation["responses"].items() if status[0] == "2"]
    for body in (operation.get("requestBody", {}), *answers):
        content = body.get("content", {}).get("application/json", {})
        if "$ref" in content.get("schema", {}):
            yield content["schema"]["$ref"].rpartition("/")[2], content["example"]
