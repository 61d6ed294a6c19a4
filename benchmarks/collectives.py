"""Prices of collectives against published times.

    python -m benchmarks.collectives benchmarks/published/nccl_model.csv

The file has the columns gpu, nodes, gpus_per_node, axis, axis_size, ranks_per_node_on_axis,
collective, bytes and microseconds. An axis "inter-node" has one rank a node, with all other ranks
of the nodes in groups of the same kind; an axis "all" has all ranks of all nodes. Printed are the
share of the rows of 64 KiB or more whose price is within 25 % of the published time, by GPU,
collective and axis, and the rows that differ most.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from pathlib import Path

from autoshard.mesh import Mesh, make_mesh

TOPOLOGIES = {
    "A100": "a100-sxm-80gb",
    "H100": "h100-sxm",
    "H200": "h200-sxm",
    "B200": "b200-sxm",
    "GB200": "gb200-nvl72",
}
"""The preset of each GPU of the files."""

MIN_BYTES = 1 << 16
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """A published time of a collective, and our price.

    Attributes:
        gpu: name of the GPU.
        nodes: number of nodes.
        gpus_per_node: number of GPUs of a node.
        axis: "inter-node" or "all".
        collective: name of the collective.
        nbytes: bytes of the whole gathered or reduced tensor.
        published: seconds.
        price: seconds.
    """

    gpu: str
    nodes: int
    gpus_per_node: int
    axis: str
    collective: str
    nbytes: int
    published: float
    price: float

    @property
    def ratio(self) -> float:
        """The price relative to the published time."""
        return self.price / self.published

    @property
    def within(self) -> bool:
        """True if the price is within the tolerance."""
        return abs(self.ratio - 1) <= TOLERANCE

    @property
    def place(self) -> str:
        """The axis, with whether it leaves a node."""
        return "in a node" if self.nodes == 1 else self.axis


def read_rows(path: Path, min_bytes: int = MIN_BYTES) -> list[Row]:
    """The rows of a file of at least a number of bytes, with our prices."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file) if int(line["bytes"]) >= min_bytes]


def _row(line: dict[str, str]) -> Row:
    gpu, axis, nbytes = line["gpu"], line["axis"], int(line["bytes"])
    nodes, per_node = int(line["nodes"]), int(line["gpus_per_node"])
    mesh = _mesh(gpu, nodes, per_node, axis)
    return Row(
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=per_node,
        axis=axis,
        collective=line["collective"],
        nbytes=nbytes,
        published=float(line["microseconds"]) * 1e-6,
        price=mesh.collective_time(line["collective"], 0, nbytes),
    )


def _mesh(gpu: str, nodes: int, per_node: int, axis: str) -> Mesh:
    shape = (nodes * per_node,) if axis == "all" else (nodes, per_node)
    return make_mesh(shape, topology=TOPOLOGIES[gpu], gpus_per_node=per_node)


def share_within(rows: Sequence[Row]) -> float:
    """Share of the rows whose price is within the tolerance."""
    return sum(row.within for row in rows) / len(rows)


def _table(rows: Iterable[Row], key: Callable[[Row], tuple[str, ...]]) -> Iterable[str]:
    for names, group in groupby(sorted(rows, key=key), key):
        found = list(group)
        yield f"{' '.join(names):<40} {len(found):>5} rows {share_within(found):>6.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="file of the shape of published/nccl_model.csv")
    parser.add_argument("--worst", type=int, default=20, help="number of worst rows to print")
    given = parser.parse_args(arguments)
    rows = read_rows(given.rows)
    print("\n".join(_table(rows, lambda row: (row.gpu,))), "\n")
    print("\n".join(_table(rows, lambda row: (row.gpu, row.collective, row.place))), "\n")
    for row in sorted(rows, key=lambda row: -abs(log(row.ratio)))[: given.worst]:
        print(
            f"{row.gpu} {row.nodes} x {row.gpus_per_node} {row.axis:<10} {row.collective:<14} "
            f"{row.nbytes:>11,} B: {row.price * 1e6:>9.1f} us, published "
            f"{row.published * 1e6:>9.1f} us ({row.ratio:.2f} x)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
