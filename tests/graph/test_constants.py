"""Values of constants that are stored in a graph."""

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import ExportError, SchemaError
from autoshard.graph import Graph, export_model, graph_from_json, graph_to_json, load_graph
from autoshard.graph.archive.read import CONSTANT_BYTES, CONSTANTS_BYTES, read_constants
from autoshard.runtime.program.constants import constant_value

CPU = torch.device("cpu")


class Numbers(nn.Module):
    """What forward writes as numbers, beside what it makes of something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.tensor(0.5) + torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
        x = torch.where(torch.as_tensor([True, False]), x, torch.tensor(-1.5, dtype=torch.float64))
        return x + torch.tensor([], dtype=torch.bfloat16).sum() + torch.tensor((0.1, 2))


EXPECTED = [
    torch.tensor(0.5),
    torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
    torch.tensor([True, False]),
    torch.tensor(-1.5, dtype=torch.float64),
    torch.tensor([], dtype=torch.bfloat16),
    torch.tensor((0.1, 2)),
]


def values(graph: Graph) -> list[torch.Tensor | None]:
    constants = [i for i in graph.inputs if i.kind == "constant"]
    return [constant_value(graph, constant.name, CPU) for constant in constants]


def saved(model: nn.Module, *args: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, args), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "archive",
    [lambda m, x: export_model(m, (x,)), saved],
    ids=["exported here", "exported by torch"],
)
def test_numbers_that_forward_writes_keep_their_values(
    archive: Callable[[nn.Module, torch.Tensor], bytes],
) -> None:
    graph = load_graph(archive(Numbers(), torch.ones(2, 2)))
    assert "aten.to" not in {node.operator.rpartition(".")[0] for node in graph.nodes}
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert again == graph
    for value, expected in zip(values(again), EXPECTED, strict=True):
        assert value is not None
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


class Held(nn.Module):
    """Constants of the model: in an attribute, and in a list of a dict of an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)
        self.inner = nn.Identity()
        self.inner.tables = {"of": [torch.ones(4), torch.arange(4.0)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table * x + self.inner.tables["of"][1] * x


class Many(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1.0] * (CONSTANT_BYTES // 4 + 4)).view(-1, 4) * x


class Trained(nn.Module):
    """A tensor with a gradient that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.free = [torch.ones(4, requires_grad=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.free[0] * x


class InTuple(nn.Module):
    """A parameter that forward reads in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.weights = (self.layer.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[0]


def test_a_models_own_constants_are_named_by_their_paths() -> None:
    graph = load_graph(export_model(Held(), (torch.ones(4),)))
    names = [i.target for i in graph.inputs if i.kind == "constant"]
    assert names == ["table", 'inner.tables["of"][1]']
    assert values(graph) == [None] * 2
    by_torch = values(load_graph(saved(Held(), torch.ones(4))))
    assert [None if x is None else x.tolist() for x in by_torch] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Many(), r"a tensor \[16388\] of data that an export on the meta device does not have"),
        (InTuple(), r"reads 'weights\[0\]', whose gradient would be lost.*not in a tuple"),
        (Trained(), r"reads 'free\[0\]', whose gradient would be lost: make it a parameter"),
    ],
    ids=["many numbers", "a parameter in a tuple", "a gradient"],
)
def test_constants_that_would_be_lost_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_model(model, (torch.ones(4),))


CONFIG = "data/constants/model_constants_config.json"


def tampered(change: Callable[[dict[str, Any]], object], contents: bytes = b"\0\0\0?") -> bytes:
    """The archive of one constant, what it says of it changed."""

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(0.5)

    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(export_model(Half(), (torch.ones(2),)))) as source,
        zipfile.ZipFile(made, "w") as target,
    ):
        for name in source.namelist():
            data = source.read(name)
            if name.endswith(CONFIG):
                config = json.loads(data)
                change(config["config"]["lifted_tensor_0"])
                data = json.dumps(config).encode()
            elif name.endswith("constants/tensor_0"):
                data = contents
            target.writestr(name, data)
    return made.getvalue()


ONE, TWO = {"as_int": 1}, {"as_int": 2}


def unchanged(_: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (tampered(lambda c: c.update(tensor_meta=[])), "must be a JSON object"),
        (tampered(lambda c: c.update(use_pickle=None)), "'use_pickle' must be a JSON boolean"),
        (tampered(lambda c: c["tensor_meta"].update(sizes=[4])), "a size must be a JSON object"),
        (tampered(unchanged, b"\0"), "tensor_0 has 1 bytes, too few for"),
        (tampered(lambda c: c["tensor_meta"].update(dtype=6)), "'lifted_tensor_0' is float32"),
    ],
)
def test_what_an_archive_says_of_a_constant_is_checked(archive: bytes, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        load_graph(archive)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(use_pickle=True),
        lambda c: c.update(path_name="../../models/model.json"),
        lambda c: c["tensor_meta"].update(storage_offset={"as_expr": {}}),
        lambda c: c["tensor_meta"].update(layout=1),
        lambda c: c["tensor_meta"].update(sizes=[TWO, TWO], strides=[ONE, TWO]),
        lambda c: c["tensor_meta"]["device"].update(type="meta"),
    ],
)
def test_what_cannot_be_read_plainly_is_not_read(change: Callable[[dict[str, Any]], Any]) -> None:
    assert values(load_graph(tampered(unchanged))) == [torch.tensor(0.5)]
    assert values(load_graph(tampered(change))) == [None]


def test_constants_that_share_a_file_have_values_up_to_a_limit_of_them_all() -> None:
    size = {"as_int": CONSTANT_BYTES}
    meta = {
        "dtype": 1,
        "layout": 7,
        "device": {"type": "cpu"},
        "sizes": [size],
        "strides": [ONE],
        "storage_offset": {"as_int": 0},
    }
    entry = {"use_pickle": False, "path_name": "tensor_0", "tensor_meta": meta}
    config = {"config": dict.fromkeys(map(str, range(1000)), entry)}
    found = read_constants(config, lambda _: bytes(CONSTANT_BYTES))
    assert len(found) == CONSTANTS_BYTES // CONSTANT_BYTES < 1000


def test_a_constant_may_begin_inside_its_storage() -> None:
    archive = tampered(lambda c: c["tensor_meta"].update(storage_offset=ONE), b"\0\0\0\0\0\0\0?")
    assert values(load_graph(archive)) == [torch.tensor(0.5)]


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"contents": "A?A="}, "contents: Data should be valid base64"),
        ({"contents": "AAA="}, "has contents of 2 bytes, but it is"),
        ({"contents": 5}, "contents: Input should be a valid bytes"),
        ({"kind": "buffer"}, "has contents of 4 bytes, but it is a buffer"),
    ],
)
def test_a_value_fits_its_constant(update: dict[str, Any], message: str) -> None:
    document = graph_to_json(load_graph(tampered(unchanged)))
    (constant,) = (i for i in document["inputs"] if i["kind"] == "constant")
    constant.update(update)
    with pytest.raises(SchemaError, match=message):
        graph_from_json(document)
