"""Blocks of tensors in safetensors files, on one device."""

from io import FileIO
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reads import COUNTERS, bytes_read_by_process

from autoshard.checkpoint.readers import open_checkpoint
from autoshard.checkpoint.safetensors_file import (
    SHORT_RUN,
    TensorInfo,
    read_header,
    read_slice,
    write_header,
    write_slice,
)
from autoshard.runtime.shards import SubShard


@st.composite
def blocks(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[slice, ...]]:
    shape = draw(st.lists(st.integers(1, 24), max_size=4))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.bool, torch.complex64)))
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    values = torch.randint(0, 2, shape).to(dtype)
    return values, tuple(slice(start, stop) for start, stop in ends)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks") / "block.safetensors"


@given(blocks())
def test_any_block_is_read(scratch: Path, block: tuple[torch.Tensor, tuple[slice, ...]]) -> None:
    tensor, parts = block
    buffer = torch.empty(1 << 12, dtype=torch.uint8)  # too small for some
    before = torch.ones(3, dtype=torch.float64)  # so that the tensor does not come first
    safetensors.torch.save_file({"before": before, "it": tensor}, scratch)
    with FileIO(scratch) as file:
        values, num_bytes = read_slice(file, read_header(scratch)["it"], parts, buffer)
    assert torch.equal(values, tensor[parts])
    assert tensor[parts].nbytes <= num_bytes <= tensor.nbytes


@given(blocks())
def test_any_block_is_written(scratch: Path, block: tuple[torch.Tensor, tuple[slice, ...]]) -> None:
    tensor, parts = block
    stored = write_header(scratch, {"it": TensorInfo(tuple(tensor.shape), tensor.dtype)})["it"]
    with FileIO(scratch, "r+") as file:
        write_slice(file, stored, parts, tensor[parts].contiguous())
    expected = torch.zeros_like(tensor)
    expected[parts] = tensor[parts]
    assert torch.equal(safetensors.torch.load_file(scratch)["it"], expected)


@given(blocks(), st.integers(1, 300))
def test_pieces_are_the_block(
    block: tuple[torch.Tensor, tuple[slice, ...]], num_bytes: int
) -> None:
    tensor, parts = block
    whole = torch.zeros_like(tensor)
    for piece in SubShard(parts, tensor[parts]).pieces(num_bytes):
        assert piece.local.nbytes <= num_bytes or piece.local.ndim == 0 or len(piece.local) == 1
        whole[piece.index] += piece.local
    expected = torch.zeros_like(tensor)
    expected[parts] = tensor[parts]
    assert torch.equal(whole, expected)


@pytest.mark.skipif(not COUNTERS.exists(), reason="the system does not count reads")
def test_nothing_else_is_read(tmp_path: Path) -> None:
    tensor = torch.randn(512, 4 * SHORT_RUN)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"it": tensor}, path)
    stored = read_header(path)["it"]
    with FileIO(path) as file:
        nothing = -bytes_read_by_process() + bytes_read_by_process()
        begin = bytes_read_by_process()
        parts = slice(0, 512), slice(SHORT_RUN, 2 * SHORT_RUN)
        _, num_bytes = read_slice(file, stored, parts, torch.empty(0, dtype=torch.uint8))
        really = bytes_read_by_process() - begin
    assert num_bytes == tensor.nbytes // 4
    assert abs(really - num_bytes - nothing) < 16  # the digits of the counters


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    dtypes = [dtype for dtype in safetensors.torch._SIZE if dtype.itemsize * 8 >= 8]
    tensors = {
        str(dtype): torch.arange(8 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        for dtype in dtypes
        if dtype != torch.float4_e2m1fn_x2
    }
    safetensors.torch.save_file(tensors, path)
    reader = open_checkpoint(path)
    assert {name: info.dtype for name, info in reader.tensors.items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }
    stored = write_header(tmp_path / "other.safetensors", reader.tensors)
    assert read_header(tmp_path / "other.safetensors") == stored
    assert all(place.start % place.info.dtype.itemsize == 0 for place in stored.values())
