"""Archives that are damaged, malicious, or not exported programs."""

import copy
import io
import json
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.errors import ArchiveError, GraphError, SchemaError, UnsupportedError
from autoshard.graph import ArchiveLimits, export_model, graph_digest, load_graph, read_archive

MODEL_FILE = "model/models/model.json"


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def meta(*shape: Any, dtype: int = 7) -> dict[str, Any]:
    sizes = [s if isinstance(s, dict) else {"as_int": s} for s in shape]
    return {"dtype": dtype, "sizes": sizes, "requires_grad": False}


def node(target: str, inputs: dict[str, Any], output: str) -> dict[str, Any]:
    return {
        "target": f"torch.ops.aten.{target}",
        "inputs": [{"name": key, "arg": arg, "kind": 1} for key, arg in inputs.items()],
        "outputs": [tensor(output)],
        "metadata": {"nn_module_stack": "k,,t;k,block@1,t"},
        "name": output,
    }


def program() -> dict[str, Any]:
    """x -> relu -> cat([relu, x]) -> slice -> transpose."""
    nodes = [
        node("relu.default", {"self": tensor("x")}, "relu"),
        node(
            "cat.default",
            {"tensors": {"as_tensors": [{"name": "relu"}, {"name": "x"}]}, "dim": {"as_int": -1}},
            "cat",
        ),
        node(
            "slice.Tensor",
            {
                "self": tensor("cat"),
                "dim": {"as_int": 1},
                "start": {"as_int": 1},
                "end": {"as_sym_int": {"as_name": "s"}},
            },
            "slice_1",
        ),
        node(
            "add_.Tensor",
            {"self": tensor("slice_1"), "other": {"as_float": "-Infinity"}},
            "add_",
        ),
        node("permute.default", {"self": tensor("cat"), "dims": {"as_ints": [1, -2]}}, "out"),
    ]
    hint = {"as_expr": {"expr_str": "Symbol('s0')", "hint": {"as_int": 3}}}
    graph = {
        "inputs": [tensor("x")],
        "outputs": [tensor("out")],
        "nodes": nodes,
        "tensor_values": {
            "x": meta(hint, 4),
            "relu": meta(3, 4),
            "cat": meta(3, 8),
            "slice_1": meta(3, 2),
            "add_": meta(3, 2),
            "out": meta(8, 3),
        },
        "sym_int_values": {"s": hint},
        "sym_bool_values": {},
    }
    signature = {
        "input_specs": [{"user_input": {"arg": tensor("x")}}],
        "output_specs": [{"user_output": {"arg": tensor("out")}}],
    }
    return {
        "graph_module": {"graph": graph, "signature": signature, "module_call_graph": []},
        "schema_version": {"major": 8, "minor": 20},
    }


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def archive_of(model: object) -> bytes:
    return zipped(**{MODEL_FILE: json.dumps(model).encode()})


def test_path_bytes_and_bare_model_are_one_program(tmp_path: Path) -> None:
    data = archive_of(program())
    path = tmp_path / "model.pt2"
    path.write_bytes(data)
    bare = tmp_path / "model.json"
    bare.write_text(json.dumps(program(), indent=1))
    sources = [data, path, str(path), bare, bare.read_bytes()]
    assert len({graph_digest(load_graph(source)) for source in sources}) == 1


def test_hints_replace_symbols_and_module_paths_are_kept() -> None:
    graph = load_graph(archive_of(program()))
    assert graph.values["x"].shape == (3, 4)
    cut = next(n for n in graph.nodes if n.operator == "aten.slice.Tensor")
    assert cut.argument("end") == 3
    add = next(n for n in graph.nodes if n.operator == "aten.add.Tensor")
    assert add.argument("other") == float("-inf")
    assert {n.module for n in graph.nodes} == {"block"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 no more", "not a readable .pt2 archive"),
        (b"\x80\x04pickle", "pickled checkpoint"),
        (archive_of(program())[:-40], "not a readable .pt2 archive"),
        (zipped(**{"model/data/weights/weight_0": b""}), "has no models/model.json"),
        (zipped(**{"model/models/other.json": b"{}"}), "has model/models/other.json"),
        (zipped(**{MODEL_FILE: b"{}", "b/models/model.json": b"{}"}), "has 2 models"),
        (zipped(**{MODEL_FILE: b" " * 1_000_000}), "like a zip bomb"),
    ],
)
def test_bad_archives_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ArchiveError, match=message):
        read_archive(data)


def test_a_lying_header_does_not_get_past_the_limit() -> None:
    data = bytearray(zipped(**{MODEL_FILE: b"[" * 100_000}))
    central = data.rindex(b"PK\x01\x02")
    for header, offset in ((0, 22), (central, 24)):
        data[header + offset : header + offset + 4] = (10).to_bytes(4, "little")
    with pytest.raises(GraphError):
        read_archive(bytes(data), limits=ArchiveLimits(model_bytes=1000))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"there is no file .*none\.pt2"):
        read_archive(tmp_path / "none.pt2")


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (ArchiveLimits(archive_bytes=100), "archive_bytes"),
        (ArchiveLimits(model_bytes=100), "model_bytes"),
        (ArchiveLimits(compression_ratio=2), "compression_ratio"),
        (ArchiveLimits(nodes=4), "nodes"),
    ],
)
def test_limits_are_named(limits: ArchiveLimits, field: str) -> None:
    with pytest.raises(ArchiveError, match=field):
        load_graph(archive_of(program()), limits=limits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"a":' * 100_000, "nests too deeply"),
        (b'{"openapi": "3.1"}', "not an exported program"),
    ],
)
def test_other_json_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        load_graph(text)


def test_list_instead_of_object_is_refused() -> None:
    with pytest.raises(SchemaError, match="not an object"):
        load_graph(zipped(**{MODEL_FILE: b"[1]"}))


def test_other_schema_version_is_refused() -> None:
    model = program()
    model["schema_version"]["major"] = 9
    with pytest.raises(SchemaError, match="schema version 9"):
        load_graph(archive_of(model))


def broken(*path: Any, to: Any = None, delete: bool = False) -> bytes:
    model = program()
    owner: Any = model["graph_module"]
    for key in path[:-1]:
        owner = owner[key]
    if delete:
        del owner[path[-1]]
    else:
        owner[path[-1]] = to
    return archive_of(model)


FIRST_ARGUMENT = ("graph", "nodes", 0, "inputs", 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken("graph", delete=True), "'graph' is missing"),
        (broken("signature", delete=True), "'signature' is missing"),
        (broken("graph", "nodes", 1, "outputs", delete=True), r"nodes\[1\] \(cat\): 'outputs' is"),
        (broken("graph", "nodes", 0, to=7), r"nodes\[0\]: .* must be a JSON object, not 7"),
        (broken("graph", "tensor_values", "cat", delete=True), "'cat' has no entry"),
        (broken("graph", "tensor_values", "x", "dtype", to=True), r"tensor_values\['x'\]: 'dtype'"),
        (broken("graph", "tensor_values", "x", "sizes", 0, to={"as_int": -1}), "non-negative"),
        (broken(*FIRST_ARGUMENT, "arg", to=tensor("gone")), "uses 'gone', which is neither"),
        (broken(*FIRST_ARGUMENT, "arg", to=tensor("cat")), "uses 'cat', which is neither"),
        (broken(*FIRST_ARGUMENT, "arg", to={}), r"nodes\[0\] \(relu\): argument 'self'"),
        (broken("graph", "outputs", 0, to=tensor("gone")), "returns 'gone'"),
        (
            broken("graph", "nodes", 2, "inputs", 3, "arg", "as_sym_int", "as_name", to="t"),
            "'t' is",
        ),
        (broken("graph", "nodes", 4, "inputs", 1, "arg", to={"as_ints": [1, -3]}), "dim -3 is out"),
        (broken("graph", "nodes", 1, "outputs", 0, to=tensor("relu")), "'relu' is used 2 times"),
    ],
)
def test_malformed_programs_name_the_place(data: bytes, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        load_graph(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken("graph", "sym_int_values", "s", "as_expr", "hint", to=None), "depends on the data"),
        (broken("graph", "tensor_values", "x", "dtype", to=31), "element type code 31"),
        (broken(*FIRST_ARGUMENT, "arg", to={"as_custom_obj": {}}), "'as_custom_obj' cannot"),
        (broken("signature", "input_specs", 0, to={"token": {}}), "inputs of kind 'token'"),
        (broken("signature", "output_specs", 0, to={"buffer_mutation": {}}), "run_decompositions"),
    ],
)
def test_unsupported_features_are_named(data: bytes, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_graph(data)


def test_a_program_without_nodes_is_a_graph() -> None:
    model = program()
    model["graph_module"]["graph"]["nodes"] = []
    model["graph_module"]["graph"]["outputs"] = [tensor("x"), {"as_int": 3}]
    graph = load_graph(archive_of(model))
    assert graph.nodes == ()
    assert [o.name for o in graph.outputs] == ["x", None]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    nested = [place for key, item in items for place in places(item, (*path, key))]
    return [path, *nested] if path else nested


class Everything(nn.Module):
    """Views, writes, a region and a loss, all in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        base = x.clone()
        left, right = base.split([2, 4], dim=1)
        left[1] = right[0, :2]
        base.permute(1, 0)[1:3].mul_(2.0)
        base.unbind(1)[0].relu_()
        with torch.no_grad():
            scale = self.head(base).sum()
        whole = torch.cat([left, right], dim=1)[:, :2] * scale
        return nn.functional.cross_entropy(self.head(base + whole.sum()), labels)


@pytest.fixture(scope="module")
def exported() -> dict[str, Any]:
    labels = torch.zeros(4, dtype=torch.int64)
    model = read_archive(export_model(Everything(), (torch.zeros(4, 6), labels))).model
    return {key: model[key] for key in ("graph_module", "schema_version")}


STRANGE = st.sampled_from(
    [None, True, -1, 0, 1, 99, 2.5, "", "x", "cat", [], [0], {}, {"as_int": 7}, {"as_none": True}]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(fraction=st.floats(0, 1, exclude_max=True), value=STRANGE, delete=st.booleans())
def test_whatever_is_wrong_is_a_graph_error(
    exported: dict[str, Any], fraction: float, value: object, *, delete: bool
) -> None:
    model = copy.deepcopy(exported)
    found = [p for p in places(model) if "metadata" not in p[:-1] and "strides" not in p[:-1]]
    *path, last = found[int(fraction * len(found))]
    owner: Any = model
    for key in path:
        owner = owner[key]
    if delete:
        del owner[last]
    else:
        owner[last] = value
    with suppress(GraphError):
        load_graph(json.dumps(model).encode())


@pytest.mark.parametrize("target", ["", "relu", "torch.ops.", "torch.ops.relu", ".relu", "aten."])
def test_an_operator_has_a_name_within_a_namespace(target: str) -> None:
    document = program()
    document["graph_module"]["graph"]["nodes"][0]["target"] = target
    with pytest.raises(SchemaError, match="not the name of an operator"):
        load_graph(json.dumps(document).encode())
