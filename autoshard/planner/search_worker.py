"""The process of a mesh search: lines of JSON in, lines of JSON out.

The first line holds graph and options, every further line a mesh. Each mesh is answered
with a plan, or with what is wrong with it. Before its answer the process may ask for tables
of solved blocks and hand over others. It ends when its stdin does, also in the middle of a
plan: nobody would hear the answer.
"""

import json
import os
import queue
from base64 import b64decode, b64encode
from threading import Thread
from typing import Any, TextIO

from autoshard.errors import InputError
from autoshard.graph import Graph, graph_from_json
from autoshard.mesh import mesh_from_json
from autoshard.plan.options import PlanOptions
from autoshard.planner.planner import make_plan
from autoshard.solve import KeyValueStore


class _RemoteBlockCache:
    """The tables of whoever started this process.

    Args:
        lines: what arrives.
        answers: where to ask.
    """

    def __init__(self, lines: "queue.SimpleQueue[str]", answers: TextIO) -> None:
        self._lines = lines
        self._answers = answers

    def get(self, key: str) -> bytes | None:
        _say(self._answers, {"get": key})
        body = json.loads(self._lines.get())["body"]
        return None if body is None else b64decode(body)

    def put(self, key: str, body: bytes) -> None:
        _say(self._answers, {"put": key, "body": b64encode(body).decode()})


def main() -> None:
    """Plan what arrives on stdin."""
    answers = _claim_stdout()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    Thread(target=_listen, args=(lines,), daemon=True).start()
    request = json.loads(lines.get())
    graph = graph_from_json(request["graph"])
    options = PlanOptions.model_validate(request["options"])
    block_cache = _RemoteBlockCache(lines, answers) if request["block_cache"] else None
    most = request["max_strategies"]
    while True:
        _say(answers, _answer(graph, json.loads(lines.get()), options, block_cache, most))


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _answer(
    graph: Graph,
    mesh: str,
    options: PlanOptions,
    block_cache: KeyValueStore | None,
    most: int | None,
) -> dict[str, Any]:
    try:
        plan = make_plan(
            graph, mesh_from_json(mesh), options, block_cache=block_cache, max_strategies=most
        )
        return {"plan": plan.to_json()}
    except InputError as error:
        return {"error": str(error)}


def _listen(lines: "queue.SimpleQueue[str]") -> None:
    # Not through sys.stdin: its lock, held by a daemon thread, would abort a normal exit.
    with os.fdopen(os.dup(0), encoding="utf-8") as source:
        for line in source:
            lines.put(line)
    os._exit(0)


def _claim_stdout() -> TextIO:
    """Keep stdout for answers: whatever else is printed, by C libraries too, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
