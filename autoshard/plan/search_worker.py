"""The process of a mesh search: lines of JSON in, lines of JSON out.

The first line holds graph and options, every further line a mesh. Each mesh is answered
with a plan, or with what is wrong with it. The process ends when its stdin does, also in
the middle of a plan: nobody would hear the answer.
"""

import json
import os
import queue
from threading import Thread
from typing import Any, TextIO

from autoshard.errors import InputError
from autoshard.graph import Graph, graph_from_json
from autoshard.mesh import mesh_from_json
from autoshard.plan.options import PlanOptions
from autoshard.plan.planner import make_plan


def main() -> None:
    """Plan what arrives on stdin."""
    answers = _claim_stdout()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    Thread(target=_listen, args=(lines,), daemon=True).start()
    request = json.loads(lines.get())
    graph = graph_from_json(request["graph"])
    options = PlanOptions.model_validate(request["options"])
    while True:
        answer = _answer(graph, json.loads(lines.get()), options)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(graph: Graph, mesh: str, options: PlanOptions) -> dict[str, Any]:
    try:
        return {"plan": make_plan(graph, mesh_from_json(mesh), options).to_json()}
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
