"""What a service does for commands: asked for with a progress bar; plans fetched at launch."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from httpx2 import codes
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoshard.cli.output import errors
from autoshard.cli.programs import import_modules
from autoshard.cli.render import milliseconds
from autoshard.client import Client, JobProgress, SearchedMesh
from autoshard.client.results import OnProgress
from autoshard.errors import OptionError, RequestRejectedError
from autoshard.mesh import Mesh, Topology
from autoshard.plan import Coverage, Plan, PlanOptions
from autoshard.planner import Candidate

SERVER_VARIABLE = "AUTOSHARD_SERVER"

_PLAN_ID = re.compile(r"[0-9a-f]{64}")
_PLAN_URL = re.compile(r"(?P<server>https?://.+?)/v1/plans/(?P<id>[0-9a-f]{64})/?")


def plan_remotely(
    server: str,
    graph: Path,
    mesh: Mesh,
    options: PlanOptions,
    *,
    modules: Sequence[str] = (),
    discover: bool = True,
) -> Plan:
    """The plan of a graph, made by a service, or kept here from an earlier time.

    Raises:
        OptionError: a module cannot be imported, or the API key not be read.
        GraphError: the graph cannot be read.
        ServiceError: the service does not answer, or refuses.
    """
    import_modules(modules)
    with Client(server) as client, _bar() as hear:
        result = client.request_plan(
            graph, mesh=mesh, options=options, discover=discover, on_progress=hear
        )
    assert result.plan is not None, "asked to wait for it"
    origin = {
        "service": "the service had it" if result.cached else "the service made it",
        "offline": "the service does not answer; this plan was kept on this machine",
        "local": "made in this process",
    }
    errors.print(f"[bold]plan:[/] {origin[result.source]}", highlight=False)
    return result.plan


def search_remotely(
    server: str,
    graph: Path,
    num_devices: int,
    options: PlanOptions,
    *,
    topology: str | Topology | None = None,
    max_axes: int = 3,
    modules: Sequence[str] = (),
    discover: bool = True,
) -> tuple[Candidate, ...]:
    """Every mesh of so many devices, best first, planned by a service.

    Raises:
        OptionError: a module cannot be imported, or the API key not be read.
        GraphError: the graph cannot be read.
        ServiceError: the service does not answer, or refuses.
    """
    import_modules(modules)
    with Client(server) as client, _bar() as hear:
        search = client.search(
            graph,
            num_devices=num_devices,
            topology=topology,
            max_axes=max_axes,
            options=options,
            discover=discover,
            on_progress=hear,
        )
        return tuple(_candidate(client, mesh) for mesh in search.meshes)


def cover_remotely(
    server: str, graph: Path, *, modules: Sequence[str] = (), discover: bool = True
) -> Coverage:
    """Which operators of a graph can be cut, as a service says.

    Raises:
        OptionError: a module cannot be imported, or the API key not be read.
        GraphError: the graph cannot be read.
        ServiceError: the service does not answer, or refuses.
    """
    import_modules(modules)
    with Client(server) as client:
        return client.coverage(graph, discover=discover)


def fetched_plan(text: str, folder: Path) -> Path:
    """The file of a plan: its path, or where its id or address leads, written to a folder.

    The user's API key is sent to AUTOSHARD_SERVER alone: an address may come from anybody.

    Raises:
        OptionError: an id without a server to ask, or another server that wants a key.
        ServiceError: the service has no such plan; or it does not answer, and none is kept.
    """
    found = _PLAN_URL.fullmatch(text)
    if found is None and not _PLAN_ID.fullmatch(text):
        return Path(text)
    server, plan_id = (found["server"], found["id"]) if found else (_server(text), text)
    is_ours = _origin(server) == _origin(os.environ.get(SERVER_VARIABLE, ""))
    try:
        with Client(server, api_key=None if is_ours else False) as client:
            plan = client.get_plan(plan_id)
    except RequestRejectedError as error:
        if is_ours or error.status != codes.UNAUTHORIZED:
            raise
        raise OptionError(
            f"{server} wants an API key, which is sent only to the service that "
            f"{SERVER_VARIABLE} names; set {SERVER_VARIABLE}={server} if you trust it"
        ) from error
    path = folder / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    return path


def _candidate(client: Client, mesh: SearchedMesh) -> Candidate:
    if mesh.plan_id is not None:
        return Candidate(mesh.mesh, client.get_plan(mesh.plan_id))
    if mesh.certificate is None:
        return Candidate(mesh.mesh, None, mesh.error)
    sizes = ",".join(map(str, mesh.mesh.axis_sizes))
    status = mesh.certificate.status
    return Candidate(
        mesh.mesh, None, f"{status}, and the service kept no plan: ask with plan --mesh {sizes}"
    )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        # Who sends a request there is told.
        return url, None, None
    return parts.scheme, parts.hostname, port


def _server(plan_id: str) -> str:
    server = os.environ.get(SERVER_VARIABLE)
    if not server:
        raise OptionError(
            f"--plan {plan_id[:12]}... is the id of a plan: set {SERVER_VARIABLE} to the address "
            f"of the service that has it, or give the address http://HOST:PORT/v1/plans/ID"
        )
    return server


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """A progress bar on stderr that fills as the gap closes; gone when all is done."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("asking", total=None, figures="")

        def hear(job: JobProgress) -> None:
            known = job.gap is not None
            progress.update(
                task,
                description=job.phase,
                total=1.0 if known else None,
                completed=max(0.0, 1.0 - job.gap) if job.gap is not None else 0.0,
                figures=figures_of(job),
            )

        yield hear


def figures_of(job: JobProgress) -> str:
    """What is known of a job's plan: the best so far, the bound, the gap between them."""
    figures = {"best": job.incumbent, "bound": job.bound}
    known = [f"{name} {milliseconds(s)}" for name, s in figures.items() if s is not None]
    if job.gap is not None:
        known.append(f"gap {job.gap:.2%}")
    return ", ".join(known)
