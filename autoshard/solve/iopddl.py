"""Problems in the format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.base.files import read_file
from autoshard.errors import ProblemError
from autoshard.solve.problem import Edge, Problem, ProblemNode

FORBIDDEN_COST = 1e18
"""Costs of at least this forbid a strategy or a pair."""

_GZIP_MAGIC = b"\x1f\x8b"


def read_iopddl(path: str | Path) -> Problem:
    """Read a contest instance (github.com/google/iopddl), plain or compressed with gzip.

    Args:
        path: a JSON file with `problem.nodes.{intervals,costs,usages}`,
            `problem.edges.{nodes,costs}` and, optionally, `problem.usage_limit`. Edge costs
            are row-major with the strategies of the first node outermost. An edge of more
            than two nodes is not supported; one that joins a node with itself adds its
            diagonal to the node.

    Raises:
        ProblemError: the file is not such an instance; the message says where.
    """
    data = read_file(Path(path), ProblemError)
    try:
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
        return _problem(json.loads(data)["problem"])
    except (OSError, EOFError, KeyError, TypeError, IndexError, ValueError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(f"{path} is not an IOPDDL instance: {error!r}") from error


def _problem(raw: Mapping[str, Any]) -> Problem:
    listed = raw["nodes"]
    costs = [_prices(cost) for cost in listed["costs"]]
    matrices: dict[bytes, FloatArray] = {}
    ranges: dict[int, IntArray] = {}
    edges = []
    joined = raw.get("edges", {"nodes": [], "costs": []})
    for ends, cost in zip(joined["nodes"], joined["costs"], strict=True):
        source, target = ends
        matrix = _prices(cost).reshape(len(costs[source]), len(costs[target]))
        if source == target:
            costs[source] = costs[source] + matrix.diagonal()
            continue
        matrix = matrices.setdefault(repr(matrix.shape).encode() + matrix.tobytes(), matrix)
        rows, cols = (ranges.setdefault(n, np.arange(n)) for n in matrix.shape)
        edges.append(Edge(source, target, matrix, rows, cols))
    limit = raw.get("usage_limit")
    nodes = tuple(
        ProblemNode(cost, np.array(usage, dtype=np.float64), (int(first), int(last)))
        for cost, usage, (first, last) in zip(
            costs, listed["usages"], listed["intervals"], strict=True
        )
    )
    return Problem(nodes, tuple(edges), usage_limit=np.inf if limit is None else float(limit))


def _prices(listed: list[float]) -> FloatArray:
    prices = np.array(listed, dtype=np.float64)
    return np.where(prices >= FORBIDDEN_COST, np.inf, prices)
