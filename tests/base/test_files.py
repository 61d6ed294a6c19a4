"""Files of other kinds in place of graphs and plans."""

import json
from io import BytesIO
from pathlib import Path

import pytest
import torch
from support.models import meta, mlp
from support.other_files import OTHERS
from torch import nn

import autoshard
from autoshard.base.files import kind_of, write_file
from autoshard.client import Client
from autoshard.errors import ArchiveError, OptionError, PlanError
from autoshard.graph import export_model, load_graph, read_archive
from autoshard.mesh import make_mesh
from autoshard.plan import Plan


def scripted() -> bytes:
    file = BytesIO()
    with torch.random.fork_rng(), pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)  # type: ignore[no-untyped-call]
    return file.getvalue()


@pytest.fixture(scope="module")
def graph() -> bytes:
    model, kwargs = meta(mlp, 64, 512, 512, 512)
    return export_model(model, (), kwargs)


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_kinds_are_recognised(name: str, tmp_path: Path) -> None:
    content, said = OTHERS[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ArchiveError) as error:
        load_graph(path)
    assert str(path) in str(error.value)
    assert said in str(error.value)
    with Client.local(cache=False) as client, pytest.raises(ArchiveError) as same:
        client.plan(path, mesh=(2,))
    assert str(same.value) == str(error.value)
    with pytest.raises(PlanError, match=r"not a plan|not a version"):
        Plan.from_json(content)


def test_torchscript_is_recognised() -> None:
    with pytest.raises(ArchiveError, match="TorchScript"):
        read_archive(scripted())


def test_a_plan_and_a_graph_are_not_taken_for_each_other(graph: bytes) -> None:
    plan = autoshard.make_plan(load_graph(graph), make_mesh((2,))).to_json()
    with pytest.raises(ArchiveError, match="this is a plan, not an exported graph"):
        load_graph(plan.encode())
    with pytest.raises(PlanError, match="this is an exported graph, not a plan"):
        Plan.from_json(graph)
    bare = json.dumps(read_archive(graph).model).encode()
    assert load_graph(bare).nodes
    with pytest.raises(PlanError, match="this is an exported graph, not a plan"):
        Plan.from_json(bare)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="is a folder"):
        load_graph(tmp_path)
    with pytest.raises(ArchiveError, match="there is no file"):
        load_graph(tmp_path / "none.pt2")
    with pytest.raises(ArchiveError, match="cannot be read"):
        load_graph("nul\0byte")


def test_damaged_archives_are_still_graphs(graph: bytes, tmp_path: Path) -> None:
    path = tmp_path / "half.pt2"
    path.write_bytes(graph[: len(graph) // 2])
    with pytest.raises(ArchiveError, match=r"not a readable \.pt2 archive"):
        load_graph(path)
    assert kind_of(graph).name == "an exported graph"


def test_a_file_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_file(link, "first")
    path.chmod(0o640)
    write_file(path, "second")
    assert (link.read_text(), path.stat().st_mode & 0o777) == ("second", 0o640)
    assert link.is_symlink()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OptionError, match=r"cannot write .*plan\.json: No space left"):
        write_file(path, "third")
    assert path.read_text() == "second"
    assert sorted(tmp_path.iterdir()) == [link, path]
