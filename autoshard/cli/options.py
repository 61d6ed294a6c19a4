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
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import typer
from httpx2 import codes

from autoshard.base.files import explain_topology_error, read_file
from autoshard.base.integers import MAX_INT32
from autoshard.base.outcome import OWN_SOLVER
from autoshard.base.quantities import MIN_PLAUSIBLE_BYTES, parse_bytes, unit_hint
from autoshard.cli.rendering.numbers import count
from autoshard.cli.rendering.output import check_output
from autoshard.cli.rendering.tables import Format
from autoshard.cli.rendering.wording import in_flags
from autoshard.client import Client
from autoshard.client.variables import SERVER_VARIABLE
from autoshard.costs import Optimizer
from autoshard.errors import InputError, MeshError, OptionError, PlanError, RequestRejectedError
from autoshard.layouts import Notation
from autoshard.mesh import Topology as MeshTopology
from autoshard.mesh import parse_shape, topology_from_json
from autoshard.plan import Algorithm, Mode, Plan, PlanOptions
from autoshard.plan.options import (
    AttentionKernel,
    ExecutionMode,
    ExportableTo,
    Recomputing,
    ScheduleName,
    StateDType,
    SubMeshes,
)
from autoshard.requests.models import validate_options
from autoshard.requests.this_process import ThisProcess

_PIN_KINDS = {
    "input": "inputs",
    "output": "outputs",
    "parameter": "parameters",
    "buffer": "buffers",
    "node": "nodes",
}
_PLAN_ID = re.compile(r"[0-9a-f]{64}")
_PLAN_URL = re.compile(r"(?P<server>https?://.+?)/v1/plans/(?P<id>[0-9a-f]{64})/?")

Archive = Annotated[Path, typer.Argument(help="A .pt2 archive, or its model.json.")]
PlanSource = Annotated[
    str,
    typer.Argument(
        help="A plan: a file of `autoshard plan -o`, an id, or http://HOST:PORT/v1/plans/ID."
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


_TRAINING, _MEMORY, _KERNELS = "Training or inference", "Memory", "Kernels"
_PIPELINE, _CONSTRAINTS, _SOLVER = "Pipelines", "Constraints on the plan", "Solver"


def _described(name: str, panel: str, **settings: Any) -> Any:
    """An option of planning, described as in `PlanOptions`."""
    field = PlanOptions.model_fields[name]
    if field.annotation is int:
        settings |= {"min": 1, "max": MAX_INT32}
    flags = (f"--{name.replace('_', '-')}",) if field.annotation is bool else ()
    text = str(field.description).removeprefix("whether ").removeprefix("to ")
    text = text.replace("if null", "by default").replace("If null", "By default")
    text = in_flags(text[0].upper() + text[1:])
    return typer.Option(*flags, help=text, rich_help_panel=panel, **settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """Options of planning."""

    panel: ClassVar[str | None] = None
    mode: Annotated[Mode, _described("mode", _TRAINING)] = "training"
    optimizer: Annotated[Optimizer, _described("optimizer", _TRAINING)] = Optimizer.ADAMW
    master_weights: Annotated[bool, _described("master_weights", _TRAINING)] = False
    state_dtype: Annotated[StateDType | None, _described("state_dtype", _TRAINING)] = None
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory",
            "--memory-budget",
            metavar="BYTES",
            help="Memory per device, such as 80GB; default: all that the device has.",
            rich_help_panel=_MEMORY,
        ),
    ] = None
    reshard_after_forward: Annotated[Recomputing, _described("reshard_after_forward", _MEMORY)] = (
        "auto"
    )
    regather_activations: Annotated[bool, _described("regather_activations", _MEMORY)] = False
    activation_checkpointing: Annotated[
        Recomputing, _described("activation_checkpointing", _MEMORY)
    ] = "auto"
    checkpointed_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            rich_help_panel=_MEMORY,
            help="Module that activation checkpointing recomputes as a whole, instead of repeated "
            "blocks; it may be a pattern: 'layers.*'. Repeatable.",
        ),
    ] = None
    micro_batches: Annotated[int, _described("micro_batches", _TRAINING)] = 1
    in_flight: Annotated[int, _described("in_flight", _PIPELINE)] = 1
    stages: Annotated[str | None, _described("stages", _PIPELINE, metavar="NUMBER|auto")] = None
    cut: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            rich_help_panel=_PIPELINE,
            help="Where a pipeline stage must begin: before:MODULE, after:MODULE, or at:OPERATOR; "
            "MODULE may be a pattern: 'before:transformer.h.4'. Repeatable.",
        ),
    ] = None
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="time|flops|parameters|bytes|NUMBERS",
            rich_help_panel=_PIPELINE,
            help="Choose the cuts into stages without optimization: by time, flops, parameters or "
            "bytes, or numbers of layers, such as 3,3,4,2.",
        ),
    ] = None
    schedule: Annotated[Literal["auto", ScheduleName], _described("schedule", _PIPELINE)] = "auto"
    stages_per_rank: Annotated[
        str, _described("stages_per_rank", _PIPELINE, metavar="NUMBER|auto")
    ] = "auto"
    sub_meshes: Annotated[SubMeshes, _described("sub_meshes", _PIPELINE)] = "equal"
    accumulation_dtype: Annotated[
        StateDType | None, _described("accumulation_dtype", _TRAINING)
    ] = None
    fused_gradient_accumulation: Annotated[
        bool, _described("fused_gradient_accumulation", _KERNELS)
    ] = False
    foreach_optimizer: Annotated[bool, _described("foreach_optimizer", _KERNELS)] = False
    execution: Annotated[ExecutionMode, _described("execution", _KERNELS)] = "eager"
    eager_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            rich_help_panel=_KERNELS,
            help="With --execution compile, module whose operators run one by one all the same; "
            "it may be a pattern: 'layers.*.mlp'. Repeatable.",
        ),
    ] = None
    float8_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE",
            rich_help_panel=_KERNELS,
            help="Module whose linear layers multiply in float8; it may be a pattern: 'layers.*'. "
            "Repeatable.",
        ),
    ] = None
    float8_saved_inputs: Annotated[bool, _described("float8_saved_inputs", _KERNELS)] = False
    weighted_activations: Annotated[bool, _described("weighted_activations", _KERNELS)] = False
    expert_launch: Annotated[float, _described("expert_launch", _KERNELS, metavar="SECONDS")] = 0.0
    float8_weights_once: Annotated[bool, _described("float8_weights_once", _KERNELS)] = False
    attention_kernel: Annotated[AttentionKernel, _described("attention_kernel", _KERNELS)] = "auto"
    bucket_bytes: Annotated[str | None, _described("bucket_bytes", _KERNELS, metavar="BYTES")] = (
        None
    )
    activation_overlap: Annotated[
        float, _described("activation_overlap", _KERNELS, metavar="SHARE")
    ] = 0.0
    dispatch_share: Annotated[float, _described("dispatch_share", _KERNELS, metavar="SHARE")] = 1.0
    balanced_attention: Annotated[bool, _described("balanced_attention", _KERNELS)] = False
    overlap: Annotated[bool | None, _described("overlap", _TRAINING)] = None
    time_limit: Annotated[float, _described("time_limit", _SOLVER, metavar="SECONDS")] = 60.0
    solver: Annotated[str, _described("solver", _SOLVER, metavar="autoshard|ilp|NAME")] = OWN_SOLVER
    algo: Annotated[Algorithm, _described("algo", _CONSTRAINTS)] = "optimal"
    distributed_optimizer: Annotated[bool, _described("distributed_optimizer", _CONSTRAINTS)] = (
        False
    )
    exportable_to: Annotated[ExportableTo | None, _described("exportable_to", _CONSTRAINTS)] = None
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:NAME=LAYOUT",
            rich_help_panel=_CONSTRAINTS,
            help="Fix a layout, with KIND input, output, parameter, buffer or node; NAME may be a "
            "pattern: 'parameter:*.wte.weight=*,S(0)'; S(*) shards a dim of the plan's choice. "
            "Repeatable.",
        ),
    ] = None
    stored_as: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            rich_help_panel=_CONSTRAINTS,
            help="A plan file: store parameters and buffers as that plan does, so that one "
            "model can run both plans.",
        ),
    ] = None
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLLECTIVE[:OF][@AXIS]",
            rich_help_panel=_CONSTRAINTS,
            help="Forbid a collective, OF parameters, activations or both, on one axis or on all: "
            "all_gather:activations@tp. Repeatable.",
        ),
    ] = None
    batch_axis: Annotated[str | None, _described("batch_axis", _CONSTRAINTS, metavar="AXIS")] = None
    skip_fully_replicated: Annotated[
        bool,
        typer.Option(
            "--skip-fully-replicated",
            rich_help_panel=_CONSTRAINTS,
            help="Rule out that an operator which can be sharded does all of its work on every "
            "rank; views, scalars and operators without inputs are exempt.",
        ),
    ] = False
    skip_fully_replicated_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS",
            rich_help_panel=_CONSTRAINTS,
            help="Shard each operator over as many ranks of this axis, or of these axes together, "
            "as it can be. Repeatable.",
        ),
    ] = None

    def read(self) -> PlanOptions:
        """Read the options of planning.

        Raises:
            OptionError: one of them cannot be read; the message names it.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        budget = self.memory_budget
        given["memory_budget"] = None if budget is None else read_memory(budget)
        given["pins"] = _read_pins(given.pop("pin") or ())
        stored_as = given.pop("stored_as")
        if stored_as is not None:
            for kind, layouts in _read_plan_file(stored_as).state_pins().model_dump().items():
                given["pins"][kind] = layouts | given["pins"].get(kind, {})
        given["forbid"] = [_read_forbidden(text) for text in self.forbid or ()]
        given["skip_fully_replicated"] = (
            given.pop("skip_fully_replicated_on") or self.skip_fully_replicated
        )
        for name in ("cut", "checkpointed_module", "eager_module", "float8_module"):
            given[f"{name}s"] = given.pop(name) or ()
        numbers = (self.balance or "").split(",")
        if all(number.isdecimal() for number in numbers):
            given["balance"] = [int(number) for number in numbers]
        for name in ("stages", "stages_per_rank"):
            if str(given[name]).isdecimal():
                given[name] = int(given[name])
        return validate_options(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Options about the form of the output."""

    panel: ClassVar[str] = "OutputOptions"
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
        if not _PLAN_ID.fullmatch(source):
            return _read_plan_file(Path(source))
        if self.server:
            with self.open() as client:
                return client.get_plan(source)
        kept = self.here().get_plan(source)
        if kept is None:
            raise OptionError(
                f"no plan {source[:12]}... is kept on this machine: set {SERVER_VARIABLE} to the "
                f"address of the service that has it, or give http://HOST:PORT/v1/plans/ID"
            )
        return kept

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


def read_memory(text: str) -> int:
    """Read an amount of memory, such as 80GB.

    Raises:
        OptionError: it cannot be read, or it is a number without a unit that is too small.
    """
    try:
        nbytes = parse_bytes(text)
    except InputError as error:
        raise OptionError(f"--memory-budget: {error}") from None
    if nbytes < MIN_PLAUSIBLE_BYTES and text.strip().isdecimal():
        hint = unit_hint(nbytes) or "give a unit, such as 80GB"
        raise OptionError(f"--memory-budget {text} is {nbytes} bytes; {hint}")
    return nbytes


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


def _read_plan_file(path: Path) -> Plan:
    document = read_file(path, PlanError)
    try:
        return Plan.from_json(document)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _read_pins(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    pins: dict[str, dict[str, str]] = {}
    for text in texts:
        kind, colon, rest = text.partition(":")
        name, equals, layout = rest.partition("=")
        if not colon or not equals or kind not in _PIN_KINDS:
            raise OptionError(
                f"--pin {text!r} is not KIND:NAME=LAYOUT with KIND {', '.join(_PIN_KINDS)}, "
                "such as 'parameter:*.weight=S(0),R'"
            )
        same = pins.setdefault(_PIN_KINDS[kind], {})
        if same.setdefault(name, layout) != layout:
            raise OptionError(f"--pin {kind}:{name} is given twice, as {same[name]} and {layout}")
    return pins


def _read_forbidden(text: str) -> dict[str, Any]:
    collective, _, axis = text.partition("@")
    kind, _, of = collective.partition(":")
    return {"kind": kind, "of": of or None, "axis": axis or None}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        # Reported when a request is sent there.
        return url, None, None
    return parts.scheme, parts.hostname, port
