"""The parser process: reads one graph, plan or config for the process that responds to requests.

Documents that a caller has made can take much time and memory to read; here both are limited. What
a route computes from a plan is a task of it: a function, in `_TASKS`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter

from autoshard import exports, report
from autoshard.errors import ArchiveError, OptionError
from autoshard.graph import ArchiveLimits, Graph
from autoshard.mesh import topology_from_json
from autoshard.plan import Plan
from autoshard.planner import identity_of
from autoshard.report import PlanDifference
from autoshard.report.page import plan_page
from autoshard.requests.model_configs import BatchShape
from autoshard.requests.running import load_request_graph
from autoshard_server.problems import ProblemType, ServerError, limit_error
from autoshard_server.requests import (
    GraphDescription,
    SearchRequest,
    check_limit,
    search_task,
)
from autoshard_server.settings import Settings
from autoshard_server.solvers.child_program import Report, run_job
from autoshard_server.solvers.confinement import confine
from autoshard_server.solvers.messages import Solved, SolverInput

_SETTINGS = {
    "archive_bytes": "max_body_bytes",
    "model_bytes": "max_model_bytes",
    "compression_ratio": "max_compression_ratio",
    "nodes": "max_nodes",
    "values": "max_model_values",
}
"""Settings of the service by field of `ArchiveLimits`."""

_DIFFERENCE = TypeAdapter(PlanDifference)


def _describe_graph(request: Mapping[str, Any], graph: bytes, settings: Settings) -> bytes:
    """The size and the identity of a graph."""
    read = _read_graph(request["rules"], graph, settings)
    described = GraphDescription(
        num_nodes=len(read.nodes),
        num_edges=_num_edges(read),
        num_parameters=sum(read.values[p.name].numel for p in read.parameters),
        identity=identity_of(read),
    )
    return described.model_dump_json().encode()


def _check_search(request: Mapping[str, Any], submitted: bytes, settings: Settings) -> bytes:
    """The id and the request of a search's job, after checking the number of its meshes."""
    topology = request["topology"]
    stored = None if topology is None else topology_from_json(topology)
    task = search_task(SearchRequest.model_validate_json(submitted), settings, stored=stored)
    return json.dumps({"result_id": task.result_id, "request": task.request}).encode()


def _export_config(request: Mapping[str, Any], config: bytes, _settings: Settings) -> bytes:
    """The graph of the model of a config."""
    # Only the processes of this task have torch.
    from autoshard.requests.model_files import config_file, export_config  # noqa: PLC0415

    batch = BatchShape(batch_size=request["batch_size"], seq_length=request["seq_length"])
    try:
        with config_file(config) as path:
            confine()
            return export_config(path, batch, mode=request["mode"], dtype=request["dtype"])
    except OptionError as error:
        raise ServerError(ProblemType.CONFIG, str(error)) from None


def _compare(request: Mapping[str, Any], both: bytes, _settings: Settings) -> bytes:
    """The difference of two plans, whose documents follow each other."""
    split = request["length"]
    found = report.compare_plans(Plan.from_json(both[:split]), Plan.from_json(both[split:]))
    return _DIFFERENCE.dump_json(found)


def _export(request: Mapping[str, Any], plan: bytes, _settings: Settings) -> bytes:
    """A plan as code or settings of another framework."""
    least = request["min_expressed"]
    text = exports.export_plan(Plan.from_json(plan), request["target"], min_expressed=least)
    return text.encode()


def _summarise(_request: Mapping[str, Any], plan: bytes, _settings: Settings) -> bytes:
    """The summary of a plan, or why there is none."""
    return f"{report.summarise(Plan.from_json(plan), width=80)}\n".encode()


def _page(_request: Mapping[str, Any], plan: bytes, _settings: Settings) -> bytes:
    """The page of a plan, for browsers; its commands name the plan by its id."""
    made = Plan.from_json(plan)
    codes = exports.code_exports(made) if made.found else ()
    return plan_page(made, exports=codes, source=made.id).encode()


def _trace(_request: Mapping[str, Any], plan: bytes, _settings: Settings) -> bytes:
    """The trace of a step under a plan."""
    return report.plan_trace(Plan.from_json(plan)).encode()


ParserTask = Literal[
    "describe_graph",
    "check_search",
    "export_config",
    "compare",
    "export",
    "page",
    "summarise",
    "trace",
]
"""Task of a parser process."""

_TASKS: Mapping[ParserTask, Callable[[Mapping[str, Any], bytes, Settings], bytes]] = {
    "describe_graph": _describe_graph,
    "check_search": _check_search,
    "export_config": _export_config,
    "compare": _compare,
    "export": _export,
    "page": _page,
    "summarise": _summarise,
    "trace": _trace,
}


def _read_graph(rules: Sequence[Mapping[str, Any]], graph: bytes, settings: Settings) -> Graph:
    limits = ArchiveLimits(**settings.archive_limits, values=settings.max_model_values)
    try:
        read = load_request_graph(graph, rules, limits)
    except ArchiveError as error:
        if not error.limit:
            raise
        limit = getattr(limits, error.limit)
        raise limit_error(ProblemType.ARCHIVE, str(error), _SETTINGS[error.limit], limit) from None
    check_limit("max_nodes", len(read.nodes), "nodes of a graph", settings)
    check_limit("max_edges", _num_edges(read), "edges of a graph", settings)
    return read


def _num_edges(graph: Graph) -> int:
    return sum(len(node.inputs) for node in graph.nodes)


def main() -> None:
    """Do the task that arrives on stdin."""
    run_job(_prepare)


def _prepare() -> Callable[[SolverInput, Report], Solved]:
    settings = Settings()

    def run(work: SolverInput, _report: Report) -> Solved:
        request = json.loads(work.request)
        task: ParserTask = request.pop("task")
        return Solved(_TASKS[task](request, work.graph, settings), cacheable=True)

    return run
