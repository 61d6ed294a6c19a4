"""Weights from files and into files, on one device."""

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.checkpoints import (
    Tied,
    as_dcp,
    as_file,
    as_folder,
    as_torch_file,
    as_torch_index,
    check_equal,
    meta_model,
    saved,
    sharded,
)
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties

from autoshard.checkpoint import load_checkpoint, save_checkpoint
from autoshard.checkpoint.safetensors_file import TensorInfo
from autoshard.checkpoint.saving import FileWriter, write_weights
from autoshard.errors import CheckpointError
from autoshard.runtime import init_empty_weights
from autoshard.runtime.shards import SubShard


@pytest.mark.parametrize("save", [as_file, as_folder, as_torch_file, as_torch_index, as_dcp])
@pytest.mark.parametrize("build", [Tied, meta_model])
def test_what_was_saved_is_loaded(
    save: Callable[[Path, nn.Module], Path], build: Callable[[], Tied], tmp_path: Path
) -> None:
    model = Tied()
    model.norm(torch.randn(8, 16))  # so that its statistics are not those of a new one
    other = build()
    report = load_checkpoint(other, save(tmp_path, model))
    check_equal(other, model.state_dict())
    assert other.head.weight is other.embedding.weight
    assert other.embedding.weight.requires_grad
    assert torch.equal(other.table, model.table)
    whole = sum(
        t.nbytes for t in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values()
    )
    assert report.num_tensors == 6
    assert report.bytes_stored == whole
    assert report.bytes_read >= whole
    assert "6 tensors" in str(report)


def test_names_that_differ(tmp_path: Path) -> None:
    model = Tied()
    torch.save({"step": 3, "net": {"body": model.state_dict()}}, tmp_path / "run.pt")
    other = meta_model()
    load_checkpoint(other, tmp_path / "run.pt", rename="net.body.".__add__)
    check_equal(other, model.state_dict())
    with pytest.raises(CheckpointError, match=r"rename=lambda name: 'net.body.' \+ name\?"):
        load_checkpoint(other, tmp_path / "run.pt")


def test_no_renaming_is_suggested_that_does_not_help(tmp_path: Path) -> None:
    torch.save({"net": {"embedding": {"weight": torch.ones(2)}}}, tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=r"lacks 'embedding.weight'") as caught:
        load_checkpoint(meta_model(), tmp_path / "run.pt")
    assert "did you mean" not in str(caught.value)


def test_what_may_be_lacking_stays(tmp_path: Path) -> None:
    path = saved(tmp_path, norm__weight=None, extra=torch.ones(2))
    model = Tied()
    nn.init.constant_(model.norm.weight, 7)
    load_checkpoint(model, path, optional=["norm.*"], ignored=["extra"])
    assert (model.norm.weight == 7).all()
    with pytest.raises(CheckpointError, match=r"'norm.weight', which has no values in the model"):
        load_checkpoint(meta_model(), path, optional=["norm.*"], ignored=["extra"])


def test_dtypes_are_converted_if_asked(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = meta_model().to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"float32, but torch.bfloat16 in the model \(cast"):
        load_checkpoint(model, path)
    assert model.embedding.weight.is_meta
    load_checkpoint(model, path, cast=True)
    expected = safetensors.torch.load_file(path)["embedding.weight"].bfloat16()
    assert torch.equal(model.embedding.weight.detach(), expected)


def test_tied_tensors_that_differ(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'embedding.weight' and 'head.weight' are tied"):
        load_checkpoint(Tied(), saved(tmp_path, head__weight=torch.ones(40, 16)))


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"norm__bias": None}, "it lacks 'norm.bias'"),
        ({"embedding__weight": None}, "it lacks 'embedding.weight' or 'head.weight'"),
        ({"foreign": torch.ones(3)}, "the model has no 'foreign'"),
        ({"norm__bias": torch.ones(17)}, r"'norm.bias' has shape \(17,\), but \(16,\) in the"),
        ({"norm__bias": torch.ones(16).double()}, "'norm.bias' is torch.float64, but"),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    changed: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=complaint):
        load_checkpoint(model, saved(tmp_path, **changed))
    check_equal(model, before)


def test_many_differences_are_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, **{f"extra{i}": torch.ones(1) for i in range(30)})
    with pytest.raises(CheckpointError, match=r"and 20 more differences"):
        load_checkpoint(Tied(), path)


def test_buffers_that_no_checkpoint_holds(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(CheckpointError, match=r"buffer 'table', .* under init_empty_weights\(\)"):
        load_checkpoint(model, path)
    model.table = torch.zeros(16)
    load_checkpoint(model, path)


def test_models_without_memory_for_parameters() -> None:
    with init_empty_weights():
        model = Tied()
        model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
        model.register_parameter("none", None)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}
    assert model.head.weight is model.embedding.weight
    assert not model.frozen.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta


def fail_under_init_empty_weights() -> None:
    with init_empty_weights():
        raise ZeroDivisionError


def test_an_error_ends_the_context() -> None:
    with pytest.raises(ZeroDivisionError):
        fail_under_init_empty_weights()
    assert not nn.Linear(2, 2).weight.is_meta


def test_saving_divides_by_whole_tensors(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    index = json.loads(path.read_text())
    files = sorted(path.parent.glob("*.safetensors"))
    held = {n: t for file in files for n, t in safetensors.torch.load_file(file).items()}
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in held.values())
    assert set(held) == set(Tied().state_dict()) - {"head.weight"}
    sizes = [sum(t.nbytes for t in safetensors.torch.load_file(f).values()) for f in files]
    assert len(files) == 3
    assert max(sizes[1:]) <= 200 < sizes[0]  # the embedding is larger than a file may be


def test_saving_leaves_other_files_alone(tmp_path: Path) -> None:
    folder = sharded(tmp_path).parent
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"already has model-00001-of-00003.safetensors"):
        save_checkpoint(Tied(), folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_saving_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'embedding.weight' is on the meta device"):
        save_checkpoint(meta_model(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"saving failed: .*File exists"):
        save_checkpoint(Tied(), tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot store 'weight' of torch.complex128"):
        save_checkpoint(nn.Linear(2, 2, dtype=torch.complex128), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextmanager
def small_files() -> Iterator[None]:
    """Files cannot grow beyond 1000 bytes, as if the disk were full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_on_a_full_disk(folder: Path) -> None:
    with small_files():
        save_checkpoint(Tied(), folder)


def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"saving failed: .*File too large"):
        save_on_a_full_disk(tmp_path)
    assert not list(tmp_path.iterdir())


def stopped_before(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that ends before the file of a name is renamed, as if the process were killed."""
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        if Path(target).name == name:
            raise KeyboardInterrupt
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # nor does it clean up
        with pytest.raises(KeyboardInterrupt):
            write_weights(Tied(), folder, 200, replaces=True)


@pytest.mark.parametrize("former", [200, 10_000])
@pytest.mark.parametrize(
    "stopped", ["model-00002-of-00003.safetensors", "model.safetensors.index.json"]
)
def test_a_save_that_is_stopped_leaves_the_former_checkpoint(
    former: int, stopped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loaded = Tied(), Tied()
    write_weights(model, tmp_path, former, replaces=True)
    before = {path.name for path in tmp_path.iterdir()}
    number = "model-2" if former == 200 else "model"
    stopped_before(stopped.replace("model-", f"{number}-", 1), tmp_path, monkeypatch)
    assert {path.name for path in tmp_path.iterdir()} > before
    load_checkpoint(loaded, tmp_path)
    check_equal(loaded, model.state_dict())
    other = Tied()
    write_weights(other, tmp_path, 200, replaces=True)
    load_checkpoint(loaded, tmp_path)
    check_equal(loaded, other.state_dict())
    assert len([*tmp_path.iterdir()]) == 4
    assert not [*tmp_path.glob("*.unfinished")]


def test_what_a_stopped_save_has_left_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_before("model.safetensors.index.json", tmp_path, monkeypatch)
    assert [*tmp_path.glob("*.safetensors")]
    model, loaded = Tied(), Tied()
    save_checkpoint(model, tmp_path, max_file_bytes=200)
    load_checkpoint(loaded, tmp_path)
    check_equal(loaded, model.state_dict())
    assert len([*tmp_path.iterdir()]) == 4


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    tensor = torch.randn(2000)
    writer = FileWriter(tmp_path / "it", {"it": TensorInfo((2000,), torch.float32)})
    writer.begin()
    writer.check()
    with small_files():
        writer.write("it", SubShard((slice(0, 2000),), tensor))
        writer.write("it", SubShard((slice(0, 10),), tensor[:10]))  # nothing more happens
    with pytest.raises(OSError, match="File too large"):
        writer.check()
    writer.discard()
    assert not list(tmp_path.iterdir())


class _AttributePickler(pickle.Pickler):
    """Pickles members of an enum as Python 3.11.0 to 3.11.3 do, or an attribute of something."""

    attribute: tuple[object, str] | None = None

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Enum):
            return getattr, self.attribute or (type(value), value.name)
        return NotImplemented


def repickled(path: Path, attribute: tuple[object, str] | None = None) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301  our own checkpoint
    with (path / ".metadata").open("wb") as file:
        pickler = _AttributePickler(file)
        pickler.attribute = attribute
        pickler.dump(metadata)


def test_metadata_of_other_python_versions_is_read(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    path = as_dcp(tmp_path, model)
    repickled(path)
    load_checkpoint(other, path)
    check_equal(other, model.state_dict())


def test_metadata_reads_no_other_attributes(tmp_path: Path) -> None:
    path = as_dcp(tmp_path, Tied())
    repickled(path, (TensorProperties, "__init__"))
    with pytest.raises(CheckpointError, match="'__init__' is not allowed in metadata"):
        load_checkpoint(Tied(), path)


def test_parameters_larger_than_the_memory_take_none() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1024, 65_536, 65_536))
            self.register_buffer("table", torch.empty(8).fill_(3.0))
            nn.init.normal_(self.weight)

    with init_empty_weights():
        model = Experts()
    assert model.weight.is_meta
    assert model.weight.nbytes > 1 << 43
    assert model.get_buffer("table").tolist() == [3.0] * 8
