"""Bodies that are small when sent, and large or slow when they are read."""

import hashlib
import json
import random
import re
from functools import cache
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile

import torch
import zstandard
from sqlalchemy import text

from autoshard.cli.commands.demo import export_gpt2
from autoshard.graph import export_model
from autoshard_solver_cache import open_engine
from benchmarks.faults.harness import graph_of

_MODEL_BYTES = 258_000_000
_MANY_DIMS = 64

SMALL = 40
"""Number of the small program of the other caller."""


class _ThreeOperators(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x) * 2.0)


@cache
def gpt2() -> bytes:
    """GPT-2 with 124 million parameters."""
    return export_gpt2()


def prepare() -> None:
    """Make all bodies: programs cannot be exported by several threads at the same time."""
    for make in (gpt2, many_dims, ones, empty_objects, large_model):
        make()
    for number in (0, SMALL, SMALL + 7):
        graph_of(number)


@cache
def many_dims() -> bytes:
    """Three operators on a tensor of 64 dims, of which 24 can be sharded."""
    with torch.device("meta"):
        x = torch.zeros((2,) * 24 + (1,) * (_MANY_DIMS - 24))
    return export_model(_ThreeOperators(), (x,))


def zstd(body: bytes) -> bytes:
    """A compressed body."""
    return zstandard.ZstdCompressor(level=3).compress(body)


@cache
def ones() -> bytes:
    """A look-up with a mesh of 520,000 axes."""
    asked = {"graph_sha256": "0" * 64, "mesh": {"shape": [1] * 520_000}}
    return zstd(json.dumps(asked, separators=(",", ":")).encode())


@cache
def empty_objects() -> tuple[str, bytes]:
    """62.7 MB of empty objects, compressed; and the digest before that."""
    body = b"[" + b"{}," * 20_900_000 + b"{}]"
    return hashlib.sha256(body).hexdigest(), zstd(body)


@cache
def large_model() -> bytes:
    """A zip of about 31 MB with a model.json of 258 MB, which is inside all limits."""
    numbers = random.Random(0)
    block = "".join(
        f'{{"name":"node_{numbers.randrange(9999)}","inputs":[{{"as_int":{numbers.randrange(99)}}}]}},'
        for _ in range(20_000)
    ).encode()
    begin, end = b'{"graph_module":{"graph":{"nodes":[', b"{}]}}}"
    buffer = BytesIO()
    with (
        ZipFile(buffer, "w", ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("m/models/model.json", "w", force_zip64=True) as file,
    ):
        file.write(begin)
        for _ in range(_MODEL_BYTES // len(block)):
            file.write(block)
        file.write(end)
    return buffer.getvalue()


def slow_graph(number: int) -> bytes:
    """A model.json of 6 MB that is refused when all of it was read; another for each number."""
    return b'{"a": [' + b"{}," * 2_000_000 + str(number).encode() + b"]}"


def stored_bytes(url: str) -> int:
    """Bytes of the requests that a database of jobs contains."""
    engine = open_engine(url)
    try:
        with engine.begin() as connection:
            found = connection.execute(text("SELECT coalesce(sum(length(request)), 0) FROM jobs"))
            return int(found.scalar_one())
    finally:
        engine.dispose()


def with_size(archive: bytes, size: int) -> bytes:
    """An exported program in which all dims of 16 are another number."""
    made = BytesIO()
    with ZipFile(BytesIO(archive)) as given, ZipFile(made, "w") as changed:
        for name in given.namelist():
            body = given.read(name)
            if name.endswith("model.json"):
                body = re.sub(rb'("as_int": ?)16\b', rb"\g<1>" + str(size).encode(), body)
            changed.writestr(name, body)
    return made.getvalue()


def padded(archive: bytes, nbytes: int, number: int) -> bytes:
    """An exported program with another file in its zip, so that it is larger."""
    made = BytesIO()
    with ZipFile(BytesIO(archive)) as given, ZipFile(made, "w") as changed:
        for name in given.namelist():
            changed.writestr(name, given.read(name))
        changed.writestr("archive/extra/padding", random.Random(number).randbytes(nbytes))
    return made.getvalue()
