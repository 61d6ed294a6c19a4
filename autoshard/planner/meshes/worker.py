"""Worker process of a mesh search, which exchanges lines of JSON over stdin and stdout.

The first line contains the graph, every further line a mesh, its options, the seconds of the best
plan so far, and whether the first plan that fits is enough. The reply is a plan, an error, or a
lower bound, which excludes the mesh, or is what is known of a pipeline in place of a first plan.
While it plans, the worker may send requests to the block cache of its parent. It exits when its
stdin is closed, even while it plans.
"""

import json
import os
import queue
from base64 import b64decode, b64encode
from dataclasses import dataclass
from math import inf, isfinite
from threading import Thread
from typing import Any, TextIO

from autoshard.errors import InputError, TooManyStrategiesError
from autoshard.graph import Graph, graph_from_json
from autoshard.mesh import Mesh, mesh_from_json
from autoshard.plan.options import PlanOptions
from autoshard.plan.sub_meshes import num_pipeline_ranks
from autoshard.planner.baselines import ComparisonLimits, Cutoff
from autoshard.planner.pipeline.pipeline_planner import (
    make_first_plan,
    make_plan,
    pipeline_bound,
)
from autoshard.planner.pipeline.policies import num_stages, stage_cutter
from autoshard.solve import KeyValueStore


class _RemoteBlockCache:
    """Access to the block cache of the parent process."""

    def __init__(self, lines: "queue.SimpleQueue[str]", replies: TextIO) -> None:
        self._lines = lines
        self._replies = replies

    def get(self, key: str) -> bytes | None:
        _write(self._replies, {"get": key})
        body = json.loads(self._lines.get())["body"]
        return None if body is None else b64decode(body)

    def put(self, key: str, body: bytes) -> None:
        _write(self._replies, {"put": key, "body": b64encode(body).decode()})


def plans_one_stage(graph: Graph, mesh: Mesh, options: PlanOptions) -> bool:
    """True if plans of a program have one stage on a mesh.

    Raises:
        OptionError: options contradict each other or the program.
    """
    if num_pipeline_ranks(mesh) is not None:
        return False
    return options.pipeline.stages == 1 or num_stages(options, stage_cutter(graph, options)) == 1


@dataclass(frozen=True)
class _MeshPlanner:
    """Plans one program for meshes.

    Attributes:
        graph: the program.
        block_cache: as for `make_plan`.
        max_strategies: as for `make_plan`.
    """

    graph: Graph
    block_cache: KeyValueStore | None
    max_strategies: int | None

    def reply(self, question: dict[str, Any]) -> dict[str, Any]:
        """A plan of a mesh, a lower bound of its plans, or an error."""
        mesh = mesh_from_json(question["mesh"])
        options = PlanOptions.model_validate(question["options"])
        try:
            is_one = plans_one_stage(self.graph, mesh, options)
            has_bound = question["best"] is not None and is_one
            cutoff = Cutoff(question["best"] if has_bound else inf, options.solver.relative_gap)
            limits = ComparisonLimits(cutoff.report, cutoff, self.block_cache, self.max_strategies)
            if question["first"] and not is_one:
                bound = pipeline_bound(self.graph, mesh, options, limits)
                return {"bound": bound if isfinite(bound) else None}
            if question["first"]:
                plan = make_first_plan(self.graph, mesh, options, limits)
            else:
                plan = make_plan(
                    *(self.graph, mesh, options),
                    on_progress=cutoff.report,
                    cancel=cutoff,
                    block_cache=self.block_cache,
                    max_strategies=self.max_strategies,
                )
        except InputError as error:
            # Of a problem that is too large for this process, plans may exist.
            is_proof = not isinstance(error, TooManyStrategiesError)
            return {"error": str(error), "is_proof": is_proof}
        return {"bound": cutoff.bound} if cutoff.is_set() else {"plan": plan.to_json()}


def main() -> None:
    """Plan for the meshes that arrive on stdin."""
    # Redirect all other output, including that of C libraries, to stderr.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    Thread(target=_listen, args=(lines,), daemon=True).start()
    request = json.loads(lines.get())
    graph = graph_from_json(request["graph"])
    block_cache = _RemoteBlockCache(lines, replies) if request["block_cache"] else None
    planner = _MeshPlanner(graph, block_cache, request["max_strategies"])
    while True:
        _write(replies, planner.reply(json.loads(lines.get())))


def _write(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _listen(lines: "queue.SimpleQueue[str]") -> None:
    # Not through sys.stdin: its lock, held by a daemon thread, would abort a normal exit.
    with os.fdopen(os.dup(0), encoding="utf-8") as source:
        for line in source:
            lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
