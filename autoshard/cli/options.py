"""Options that several commands share, each declared once, and the parsing of their values.

A command takes a group of options as one parameter, whose type is a dataclass with a field per
option; `expand_groups` makes a Typer option of each field.
"""

import inspect
import os
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_type_hints
from urllib.parse import urlsplit

import typer
from httpx2 import codes

from autoshard.base.files import explain_topology_error, read_file
from autoshard.cli.rendering.numbers import count, share
from autoshard.cli.rendering.output import check_output
from autoshard.cli.rendering.tables import Format
from autoshard.client import Client
from autoshard.client.variables import SERVER_VARIABLE
from autoshard.errors import MeshError, OptionError, PlanError, RequestRejectedError
from autoshard.layouts import Notation
from autoshard.mesh import Topology as MeshTopology
from autoshard.mesh import parse_shape, topology_from_json
from autoshard.plan import Plan
from autoshard.requests.this_process import ThisProcess

_PLAN_ID = re.compile(r"[0-9a-f]{64}")
_MAX_LISTED = 3
_SHORT_ID = re.compile(r"[0-9a-f]{8,63}")
_PLAN_URL = re.compile(r"(?P<server>https?://.+?)/v1/plans/(?P<id>[0-9a-f]{64})/?")

Archive = Annotated[Path, typer.Argument(help="A .pt2 archive, or its model.json.")]
PlanSource = Annotated[
    str,
    typer.Argument(
        help="A plan: a file of `autoshard plan -o`, an id or its first digits, or "
        "http://HOST:PORT/v1/plans/ID."
    ),
]
Topology = Annotated[
    str | None, typer.Option(help="A preset by name, or a .json file of `autoshard calibrate`.")
]
Notated = Annotated[
    Notation,
    typer.Option(
        "--notation", help="Layouts in DTensor's words, or in short letters with a legend."
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress on stderr while plans are made.")
]
Nodes = Annotated[
    int | None,
    count(help="Number of nodes; default: as many as the topology's node size gives."),
]
GpusPerNode = Annotated[
    int | None,
    count(
        "--gpus-per-node",
        help="Number of devices of a node, instead of --nodes; not more than the topology has.",
    ),
]
Within = Annotated[
    float,
    share(
        most=10,
        help="Share by which the simplest layout of the verdict may be slower than the fastest.",
    ),
]
PlanOutput = Annotated[
    Path | None,
    typer.Option("-o", "--output", callback=check_output, help="File for the plan."),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        envvar="AUTOSHARD_CACHE",
        help="Folder of plans, solved blocks and found rules; default: in your cache folder.",
    ),
]
CustomOperator = Annotated[
    list[str] | None,
    typer.Option(
        "--custom-operator",
        help="Operator (namespace::name), or namespace, that the plan may call although it is not "
        "of ATen. Repeatable.",
    ),
]
Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import", help="Python module that registers the model's own operators. Repeatable."
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Options about the form of the output."""

    panel: ClassVar[str] = "Output"
    format: Annotated[
        Format,
        typer.Option(help="Form of the output; CSV and JSON have all rows, in seconds and bytes."),
    ] = "table"
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False

    @property
    def chosen(self) -> Format:
        """The format of both options."""
        return "json" if self.json else self.format


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Options for running a command in this process, or at a service."""

    panel: ClassVar[str] = "Service and cache"
    server: Annotated[
        str | None,
        typer.Option(
            envvar=SERVER_VARIABLE,
            help="Address of a planning service that does the work, such as http://planner:8000; "
            "default: this process.",
        ),
    ] = None
    cache: Cache = None
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Solve everything anew, and store nothing.")
    ] = False

    def open(self) -> Client:
        """Open a client of the service that `server` names.

        Raises:
            OptionError: it is no address, or the API key cannot be read.
        """
        server = self.server or ""
        if not server.startswith(("http://", "https://")):
            raise OptionError(f"--server {server!r} is not an address such as http://planner:8000")
        return Client(server, cache=self._cache)

    def here(self, *, num_workers: int = 2) -> ThisProcess:
        """Return the object that runs requests in this process.

        Args:
            num_workers: processes that a mesh search plans with.
        """
        return ThisProcess(cache=self._cache, num_workers=num_workers)

    @property
    def _cache(self) -> bool | Path:
        return False if self.no_cache else self.cache or True

    def read_plan(self, source: str) -> Plan:
        """Return the plan of a file, an id or an address.

        An API key is sent to the service of this connection only: an address may come from
        anybody.

        Raises:
            PlanError: the file has no plan; the message names it.
            OptionError: an id is unknown here, or another service requires a key.
            ServiceError: the service has no such plan; or it does not answer, and none is stored
                here.
        """
        found = _PLAN_URL.fullmatch(source)
        if found is not None:
            return self._fetch_plan(found["server"], found["id"])
        if _SHORT_ID.fullmatch(source) and not Path(source).exists():
            source = self._whole_id(source)
        if not _PLAN_ID.fullmatch(source):
            return read_plan_file(Path(source))
        if self.server:
            with self.open() as client:
                return client.get_plan(source)
        kept = self.here().get_plan(source)
        if kept is None:
            raise _not_kept(source)
        return kept

    def _whole_id(self, digits: str) -> str:
        """The id of the plan of this machine that begins with some digits.

        Raises:
            OptionError: there is none, or several, or the plan is to come from a service.
        """
        if self.server:
            raise OptionError(f"a service needs all 64 digits of the id {digits}...")
        found = self.here().plan_ids(digits)
        if not found:
            raise _not_kept(digits)
        if len(found) > 1:
            listed = ", ".join(found[:_MAX_LISTED])
            raise OptionError(f"{len(found)} plans begin with {digits}: {listed}; give more digits")
        return found[0]

    def plan_or_id(self, source: str) -> Plan | str:
        """Return the plan of a file or an address; an id as it is, for the client to look up."""
        return source if _PLAN_ID.fullmatch(source) else self.read_plan(source)

    def _fetch_plan(self, server: str, plan_id: str) -> Plan:
        is_own_service = _origin(server) == _origin(self.server or "")
        try:
            with Client(server, api_key=None if is_own_service else False) as client:
                return client.get_plan(plan_id)
        except RequestRejectedError as error:
            if is_own_service or error.status != codes.UNAUTHORIZED:
                raise
            raise OptionError(
                f"{server} requires an API key, which is sent only to the service that "
                f"{SERVER_VARIABLE} names; set {SERVER_VARIABLE}={server} if you trust it"
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomOperators:
    """Options about the model's own operators."""

    panel: ClassVar[str] = "The model's own operators"
    modules: Import = None
    no_discover: Annotated[
        bool,
        typer.Option(
            "--no-discover",
            help="Do not run the model's own operators on small tensors to find their sharding "
            "rules: they are replicated.",
        ),
    ] = False

    def discover(self) -> bool:
        """Import the modules; return True if operators may be run.

        Raises:
            OptionError: a module cannot be imported.
        """
        import_modules(self.modules or ())
        return not self.no_discover


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command for Typer, in which each field of an option group is an option."""
    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        annotation = hints[parameter.name]
        if not is_dataclass(annotation):
            parameters.append(parameter.replace(annotation=annotation))
            continue
        groups[parameter.name] = annotation
        types = get_type_hints(annotation, include_extras=True)
        for field in fields(annotation):
            kind, default = inspect.Parameter.KEYWORD_ONLY, field.default
            option = inspect.Parameter(
                field.name,
                kind,
                default=default,
                annotation=_in_panel(types[field.name], getattr(annotation, "panel", None)),
            )
            parameters.append(option)

    @wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call


def _in_panel(annotation: Any, panel: str | None) -> Any:
    """The annotation of an option, listed under a heading unless it has one."""
    kind, option = get_args(annotation)
    if panel is None or option.rich_help_panel is not None:
        return annotation
    option = copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]


def environment_connection() -> Connection:
    """Return the connection of a command without options for it: AUTOSHARD_SERVER's service."""
    return Connection(server=os.environ.get(SERVER_VARIABLE))


def import_modules(modules: Sequence[str]) -> None:
    """Import modules that register operators.

    Raises:
        OptionError: one cannot be imported.
    """
    for module in modules:
        try:
            import_module(module)
        except (ImportError, ValueError, TypeError) as error:  # the latter two: no name of a module
            raise OptionError(f"--import {module!r}: {error}") from error


def read_sizes(text: str) -> tuple[int, ...]:
    """Read the size of each mesh axis, written as 2x4 or 2,4; names are ignored.

    Raises:
        MeshError: the text cannot be read.
    """
    return parse_shape(text)[0]


def read_topology(text: str | None) -> str | MeshTopology | None:
    """Read the topology of a file, if the text ends in `.json`; else the text names a preset.

    Raises:
        MeshError: the file does not describe a topology; the message names it.
    """
    if text is None or not text.endswith(".json"):
        return text
    document = read_file(Path(text), MeshError)
    try:
        return topology_from_json(document)
    except MeshError as error:
        raise MeshError(f"{text}: {explain_topology_error(document, str(error))}") from None


def read_plan_file(path: Path) -> Plan:
    """Read the plan of a file.

    Raises:
        PlanError: the file has no plan; the message names it.
    """
    document = read_file(path, PlanError)
    try:
        return Plan.from_json(document)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _not_kept(plan_id: str) -> OptionError:
    return OptionError(
        f"no plan {plan_id[:12]}... is kept on this machine: set {SERVER_VARIABLE} to the "
        "address of the service that has it, or give http://HOST:PORT/v1/plans/ID"
    )


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        # Reported when a request is sent there.
        return url, None, None
    return parts.scheme, parts.hostname, port
