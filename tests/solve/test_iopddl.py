import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autoshard.errors import ProblemError
from autoshard.solve import read_iopddl, solve_problem

TINY = {
    "problem": {
        "name": "tiny",
        "nodes": {
            "intervals": [[0, 2], [1, 3]],
            "costs": [[15, 10**18], [55, 65, 75]],
            "usages": [[10, 10], [25, 25, 20]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[30, 40, 50, 10**18, 0, 10**19]]},
        "usage_limit": 30,
    }
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_costs_row_major_and_never_as_infinite(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "tiny.json"
    path.write_bytes(pack(json.dumps(TINY).encode()))
    problem = read_iopddl(path)
    assert problem.usage_limit == 30.0
    assert [node.interval for node in problem.nodes] == [(0, 2), (1, 3)]
    assert problem.nodes[0].cost.tolist() == [15.0, np.inf]
    assert problem.edges[0].dense().tolist() == [[30, 40, 50], [np.inf, 0, np.inf]]
    solution = solve_problem(problem)
    assert solution.choice is not None
    assert solution.choice.tolist() == [0, 2]
    assert solution.objective == 140.0


def test_an_edge_of_a_node_with_itself_is_a_cost_of_the_node(tmp_path: Path) -> None:
    nodes = {"intervals": [[0, 0]], "costs": [[1, 2]], "usages": [[0, 0]]}
    raw = {"problem": {"nodes": nodes, "edges": {"nodes": [[0, 0]], "costs": [[10, 7, 7, 1]]}}}
    path = tmp_path / "loop.json"
    path.write_text(json.dumps(raw))
    problem = read_iopddl(path)
    assert problem.nodes[0].cost.tolist() == [11.0, 3.0]
    assert problem.edges == ()
    assert problem.usage_limit == np.inf


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b"[]",
        b"{}",
        b"\x1f\x8bbroken",
        json.dumps({"problem": {"nodes": {"costs": [[1]]}}}).encode(),
        json.dumps(TINY).replace("[30, 40", "[40").encode(),
    ],
    ids=["text", "list", "empty", "gzip", "fields", "short edge"],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ProblemError, match=r"broken\.json"):
        read_iopddl(path)
