"""What containers and clusters are told agrees with the program, and nothing is left unpinned."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from autoshard.cli import app
from autoshard.cli.main import COMMANDS
from autoshard_server import Settings, create_app

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
ONLY_RUNS_MODELS = {"safetensors", "spmd-types", "torch"}
NOT_IN_THE_IMAGE = {"autoshard", *ONLY_RUNS_MODELS}
PREFIX = "AUTOSHARD_"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(text_of("pyproject.toml"))


def instructions(word: str) -> list[str]:
    """What follows a word of the Dockerfile, continued lines joined."""
    joined = text_of("Dockerfile").replace("\\\n", " ")
    return re.findall(rf"^{word} +(.*)$", joined, re.MULTILINE)


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_bytes())
    return document


def manifests(kind: str | None = None) -> list[dict[str, Any]]:
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_bytes())["resources"]
    found = [d for name in names for d in yaml.safe_load_all((KUBERNETES / name).read_bytes())]
    return [d for d in found if kind in {None, d["kind"]}]


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each pod of the manifests, and its container."""
    pods = [d["spec"]["template"]["spec"] for d in manifests("Deployment")]
    return [(pod, container) for pod in pods for container in pod["containers"]]


def commands() -> Iterator[list[str]]:
    yield [re.sub(r"[\[\]\",]", "", word) for word in instructions("CMD")[-1].split()]
    yield from (s["command"] for s in compose()["services"].values() if "command" in s)
    yield from (container["args"] for _, container in containers())


def variables() -> Iterator[str]:
    yield from re.findall(rf"\b{PREFIX}\w+(?==)", " ".join(instructions("ENV")))
    for service in compose()["services"].values():
        yield from service.get("environment", {})
    for _, container in containers():
        yield from (entry["name"] for entry in container["env"])


def test_every_command_is_one_of_ours() -> None:
    group = typer.main.get_command(app)
    found = list(commands())
    assert len(found) >= 5
    for name, *arguments in found:
        command = group.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, list(arguments))


def test_every_variable_is_a_setting() -> None:
    ours = {name for name in variables() if name.startswith(PREFIX)}
    assert "AUTOSHARD_STORE_URL" in ours
    assert {name.removeprefix(PREFIX).lower() for name in ours} <= set(Settings.model_fields)


def test_all_speak_of_one_port() -> None:
    port = 8000
    serve = COMMANDS["serve"].load("serve")
    assert {p.name: p.default for p in serve.params}["port"] == port
    assert instructions("EXPOSE") == [str(port)]
    assert f"127.0.0.1:{port}/livez" in text_of("Dockerfile")
    assert compose()["services"]["server"]["ports"][0].endswith(f":{port}")
    ports = [p for _, c in containers() for p in c.get("ports", [])]
    assert {(p["name"], p["containerPort"]) for p in ports} == {("http", port)}


@pytest.mark.thorough
def test_probes_ask_for_routes_that_exist() -> None:
    routes = set(create_app(Settings(store_url="sqlite://")).openapi()["paths"])
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    asked = {c[kind]["httpGet"]["path"] for _, c in containers() for kind in kinds if kind in c}
    assert asked == {"/livez", "/readyz"} <= routes


def test_nothing_runs_as_root_or_may_become_it() -> None:
    user = instructions("USER")[-1]
    assert user == "10001:10001"
    for pod, container in containers():
        whole, own = pod["securityContext"], container["securityContext"]
        assert f"{whole['runAsUser']}:{whole['runAsGroup']}" == user
        assert whole["runAsNonRoot"]
        assert own["readOnlyRootFilesystem"]
        assert not own["allowPrivilegeEscalation"]
        assert own["capabilities"]["drop"] == ["ALL"]
        assert not pod["automountServiceAccountToken"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"/tmp", "/var/lib/autoshard"}  # noqa: S108  a path in the container
        assert container["resources"]["limits"]["memory"]
    for name, service in compose()["services"].items():
        if name != "db":
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]


def test_workloads_end_later_than_the_service_lets_solves_run_on() -> None:
    grace = Settings(store_url="sqlite://").shutdown_grace
    for pod, _ in containers():
        assert pod["terminationGracePeriodSeconds"] > grace
    for name, service in compose()["services"].items():
        assert name == "db" or int(service["stop_grace_period"].removesuffix("s")) > grace


def test_a_solve_that_needs_too_much_fails_before_its_pod() -> None:
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    for pod, container in containers():
        given = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        mine = {k.removeprefix(PREFIX).lower(): v for k, v in given.items() if v}
        settings = Settings(**{"store_url": "sqlite://", **mine})
        limit = container["resources"]["limits"]["memory"]
        scratch = [v["emptyDir"] for v in pod["volumes"] if v["emptyDir"].get("medium") == "Memory"]
        room, *taken = (
            int(size[:-2]) * units[size[-2:]]
            for size in [limit, *(s["sizeLimit"] for s in scratch)]
        )
        # The service itself needs some, too.
        assert settings.num_workers * settings.max_job_bytes + sum(taken) + (1 << 29) < room


def test_no_password_is_committed() -> None:
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            if "PASSWORD" in name:
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), name
            assert not re.search(r"://[^/@]*:[^@]*@", value), name
    for _, container in containers():
        urls = [entry for entry in container["env"] if entry["name"].endswith("_URL")]
        assert all("secretKeyRef" in entry["valueFrom"] for entry in urls)
    assert not manifests("Secret")


def test_selectors_find_what_they_mean() -> None:
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in manifests("Deployment")]
    selectors = [d["spec"]["selector"] for d in manifests("Service")]
    selectors += [
        d["spec"]["selector"]["matchLabels"]
        for kind in ("PodDisruptionBudget", "Deployment")
        for d in manifests(kind)
    ]
    assert len(selectors) == 5
    assert all(selector in pods for selector in selectors)


def test_what_scales_is_a_deployment_whose_size_nothing_else_sets() -> None:
    folder = DEPLOY / "keda"
    scaled = yaml.safe_load((folder / "worker.yaml").read_bytes())["spec"]["scaleTargetRef"]["name"]
    whole = yaml.safe_load((folder / "kustomization.yaml").read_bytes())
    assert {(folder / name).resolve() for name in whole["resources"]} == {
        KUBERNETES,
        folder / "worker.yaml",
    }
    (patch,) = whole["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": scaled}
    assert yaml.safe_load(patch["patch"]) == [{"op": "remove", "path": "/spec/replicas"}]
    assert scaled in {d["metadata"]["name"] for d in manifests("Deployment")}


def test_all_manifests_are_part_of_the_whole() -> None:
    whole = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_bytes())
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(whole["resources"]) == files
    assert {c["image"] for _, c in containers()} == {image["name"] for image in whole["images"]}


def test_the_build_gets_all_that_it_copies() -> None:
    let_in = set(re.findall(r"^!(.+)$", text_of(".dockerignore"), re.MULTILINE))
    copied = [line.split()[:-1] for line in instructions("COPY") if "--from" not in line]
    assert {name for names in copied for name in names} == let_in
    assert all((ROOT / name).exists() for name in let_in)


def test_hadolint_finds_nothing() -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hadolint = shutil.which("hadolint", path=programs)
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run(  # noqa: S603  a linter, and our own file
        [hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def named(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(text) for text in requirements]
    return {canonicalize_name(r.name): str(r.specifier) for r in parsed}


def test_the_container_has_what_the_service_needs() -> None:
    """Groups cannot leave something out, so the group repeats the dependencies."""
    document = project()
    needed = document["project"]["dependencies"]
    for extra in ("server", "otel", "postgres"):
        needed = needed + document["project"]["optional-dependencies"][extra]
    expected = {n: s for n, s in named(needed).items() if n not in NOT_IN_THE_IMAGE}
    groups = document["dependency-groups"]
    assert named(groups["service"]) == expected
    extra = document["project"]["optional-dependencies"]["configs"]
    needed = {**named(document["project"]["dependencies"]), **named(extra)}
    assert named(groups["configs"]).items() <= needed.items()
    assert {"torch", "transformers"} <= named(groups["configs"]).keys()


@pytest.mark.thorough
def test_planning_and_serving_need_no_torch() -> None:
    """What the container leaves out is not missed: nothing of it is imported."""
    code = (
        "import sys\n"
        "for name in ('torch', 'spmd_types', 'safetensors'): sys.modules[name] = None\n"
        "import autoshard.cli, autoshard_server.serve, autoshard_server.solvers.solving\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603  our own program


WITHOUT_THE_SERVER = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop().split(","), None))

from pathlib import Path
import torch
import autoshard
from autoshard.cli.main import app

for name in autoshard.__all__:
    getattr(autoshard, name)
model = torch.nn.Linear(8, 8)
archive = autoshard.export_model(model, (torch.zeros(4, 8),))
with autoshard.Client.local() as client:
    plan = client.plan(archive, mesh=(2,))
Path("model.pt2").write_bytes(archive)
for arguments in (
    ["plan", "model.pt2", "--mesh", "2", "-o", "plan.json"],
    ["check", "model.pt2", "plan.json"],
    ["cache", "ls"],
):
    app(arguments, standalone_mode=False)
sys.argv[1:] = ["serve"]
app()
"""


@pytest.mark.thorough
def test_the_library_works_without_the_server(tmp_path: Path) -> None:
    """Planning, the client and the cache need no package of the extra; `serve` names the extra."""
    names = set(named(project()["project"]["optional-dependencies"]["server"]))
    modules = {
        module
        for module, distributions in packages_distributions().items()
        if names & {canonicalize_name(distribution) for distribution in distributions}
    }
    assert {"fastapi", "sqlalchemy", "uvicorn"} <= modules
    done = subprocess.run(  # noqa: S603  our own program
        [sys.executable, "-W", "ignore", "-c", WITHOUT_THE_SERVER, ",".join(modules)],
        cwd=tmp_path,
        env={**os.environ, "AUTOSHARD_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "pip install 'autoshard[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_that_is_installed_is_pinned() -> None:
    pins = named([line for line in text_of("constraints.txt").splitlines() if line])
    document = project()["project"]
    open_ends = [*document["dependencies"]]
    for extra in document["optional-dependencies"].values():
        open_ends += extra
    seen: set[tuple[str, frozenset[str]]] = set()
    missing = set()
    while open_ends:
        requirement = Requirement(open_ends.pop())
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name == "autoshard" or (name, extras) in seen:
            continue
        # Wheels of torch for CUDA require exact versions of these.
        if name == "triton" or name.startswith(("cuda-", "nvidia-")):
            continue
        seen.add((name, extras))
        try:
            inside = requires(name) or ()
        except PackageNotFoundError:
            continue
        if not pins.get(name, "").startswith("=="):
            missing.add(name)
        for text in inside:
            inner = Requirement(text)
            asked = [{"extra": extra} for extra in ("", *extras)]
            if inner.marker is None or any(inner.marker.evaluate(env) for env in asked):
                open_ends.append(text)
    assert not missing
