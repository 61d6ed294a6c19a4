"""Each rank reads what it holds, and what ranks hold together is saved whole."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import models
from support.comparison import close, device_mesh, whole
from support.devices import DEVICE
from support.live_memory import LiveMemory
from support.meshes import slow_devices
from support.models import graph_of
from support.reads import bytes_read_by_process
from support.shared_folder import shared_folder
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autoshard.checkpoint import load_checkpoint, save_checkpoint
from autoshard.checkpoint.readers import PIECE
from autoshard.checkpoint.saving import FileWriter
from autoshard.errors import CheckpointError, LayoutError
from autoshard.graph import Graph
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan
from autoshard.runtime import dcp_state_dict, init_empty_weights, parallelize

NUM_RANKS = 4
SQUARE = {"dp": 2, "tp": 2}
LINE = {"tp": 4}
WHOLE = {"*": "I,I"}
THIRDS = {"*.c_attn.weight": "S(0),S(1)/1+1+1", "*.wte.weight": "S(1),S(0)"}
REVERSED = {"*.weight": "S(0),S(0);1>0"}
COLUMNS = {"*_proj.weight": "S(1),I", "*.embed_tokens.weight": "S(1),S(1)"}
ON_A_LINE = {"*.c_attn.weight": "S(1)/1+1+1", "*.c_proj.weight": "S(1)", "*.wte.weight": "S(0)"}
HEADERS = 1 << 14
"""More bytes than a rank reads of a file to know what is in it."""


def gpt2() -> models.Case:
    """A GPT-2 with rows long enough to be read in part."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1,
        n_embd=512,
        n_head=4,
        n_positions=16,
        vocab_size=256,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = torch.randint(0, 256, (4, 8))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def llama() -> models.Case:
    """A Llama likewise, whose rotary table no checkpoint holds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=512,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=16,
    )
    ids = torch.randint(0, 256, (4, 8))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def on_meta(build: Callable[[], models.Case]) -> nn.Module:
    """A model without memory for parameters, so that no rank ever holds them whole."""
    with init_empty_weights():
        model, _ = build()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


@cache
def exported(build: Callable[[], models.Case]) -> Graph:
    return graph_of(build())


def plan_of(
    build: Callable[[], models.Case], parameters: Mapping[str, str], axes: Mapping[str, int]
) -> Plan:
    options = PlanOptions(pins={"parameters": parameters})
    plan = make_plan(exported(build), slow_devices(**axes), options)
    assert plan.found
    return plan


def as_index(model: nn.Module, folder: Path) -> Path:
    save_checkpoint(model, folder, max_file_bytes=1_000_000)
    assert len(list(folder.glob("*.safetensors"))) >= 4
    return folder


def as_file(model: nn.Module, folder: Path) -> Path:
    save_checkpoint(model.double(), folder)
    return folder / "model.safetensors"


def as_torch_file(model: nn.Module, folder: Path) -> Path:
    torch.save({"model": model.state_dict()}, folder / "model.pt")
    return folder / "model.pt"


class Load:
    """A model on the meta device that a checkpoint fills.

    Args:
        build: the model, always with the same weights, and its inputs.
        parameters: how the plan has them.
        save: writes the weights of a plain model.
        settings: of loading.
    """

    def __init__(
        self,
        build: Callable[[], models.Case],
        parameters: Mapping[str, str],
        save: Callable[[nn.Module, Path], Path],
        **settings: Any,
    ) -> None:
        self.build = build
        self.parameters = parameters
        self.save = save
        self.settings = settings

    def prepare(self) -> None:
        self.folder = TemporaryDirectory()  # until the process ends that made it
        self.plan = plan_of(self.build, self.parameters, SQUARE)
        self.path = self.save(self.build()[0], Path(self.folder.name))

    def __call__(self) -> None:
        model = parallelize(on_meta(self.build), self.plan, device_mesh(self.plan))
        begin = bytes_read_by_process()
        with LiveMemory() as memory:
            report = load_checkpoint(model, self.path, **self.settings)
        really_read = bytes_read_by_process() - begin
        plain, inputs = self.build()
        check_same(model, plain)
        close(whole(model(**inputs).loss.detach()), plain(**inputs).loss.detach(), "loss")
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())
        widening = 2 if self.settings.get("cast") else 1
        assert report.num_tensors == len(list(plain.parameters()))
        assert report.bytes_stored == widening * sum(p.nbytes for p in plain.parameters())
        # A state dict has tied tensors under all their names.
        is_mapped = self.path.suffix == ".pt"
        read = dict(model.named_parameters(remove_duplicate=not is_mapped)).values()
        assert report.bytes_read == widening * sum(p.to_local().nbytes for p in read)
        if not is_mapped:
            assert memory.peak <= held + PIECE
            files = len(list(Path(self.folder.name).iterdir()))
            assert report.bytes_read <= really_read <= report.bytes_read + HEADERS * files


def check_same(model: nn.Module, plain: nn.Module) -> None:
    """Both have the same weights and names, and the same of them are tied."""
    expected = plain.state_dict(keep_vars=True)
    state = model.state_dict(keep_vars=True)
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert torch.equal(whole(tensor.detach()), whole(expected[name].detach())), name
        tied = {other for other in state if state[other] is tensor}
        assert tied == {other for other in state if expected[other] is expected[name]}, name


class RotaryTable:
    """A model that is on the meta device altogether lacks values that no checkpoint has."""

    def prepare(self) -> None:
        self.plan = plan_of(llama, COLUMNS, SQUARE)

    def __call__(self) -> None:
        plain, inputs = llama()
        name = "model.rotary_emb.inv_freq"
        with shared_folder() as folder:
            if dist.get_rank() == 0:
                save_checkpoint(plain, folder)
            dist.barrier()
            with pytest.raises(CheckpointError, match=rf"{name}.*init_empty_weights\(\)"):
                load_checkpoint(self.model(), folder)
            model = self.model(constants={name: plain.get_buffer(name)})
            load_checkpoint(model, folder)
        close(whole(model(**inputs).loss.detach()), plain(**inputs).loss.detach(), "loss")

    def model(self, **settings: Any) -> nn.Module:
        with torch.device("meta"):
            model, _ = llama()
        return parallelize(model, self.plan, device_mesh(self.plan), **settings)


class Resume:
    """Training that goes on under another plan, from what the first one saved."""

    def prepare(self) -> None:
        self.plans = plan_of(gpt2, ON_A_LINE, LINE), plan_of(gpt2, THIRDS, SQUARE)

    def __call__(self) -> None:
        plain, inputs = gpt2()
        optimizer = optimizer_of(plain)
        step(plain, optimizer, inputs)
        with shared_folder() as folder:
            self._begin(Path(folder), inputs, plain)
            model, resumed = self._resume(Path(folder))
        step(plain, optimizer, inputs)
        step(model, resumed, inputs)
        for name, parameter in model.named_parameters():
            close(parameter.detach().full_tensor(), plain.get_parameter(name).detach(), name)

    def _begin(self, folder: Path, inputs: dict[str, Any], expected: nn.Module) -> None:
        """Save after one step under the first plan."""
        plan = self.plans[0]
        model = parallelize(gpt2()[0], plan, device_mesh(plan))
        optimizer = optimizer_of(model)
        step(model, optimizer, inputs)
        save_checkpoint(model, folder / "weights", max_file_bytes=500_000)
        weights, state = get_state_dict(model, optimizer)
        dcp.save(
            dcp_state_dict({"model": weights, "optimizer": state}), checkpoint_id=folder / "run"
        )
        if dist.get_rank() == 0:
            model.config.save_pretrained(folder / "weights")
            dcp_to_torch_save(folder / "run", folder / "run.pt")
            names = {"rename": "model.".__add__, "ignored": ["optimizer.*"]}
            others = GPT2LMHeadModel.from_pretrained(folder / "weights"), gpt2()[0]
            load_checkpoint(others[1], folder / "run.pt", **names)
            for other in others:
                for name, parameter in other.named_parameters():
                    close(parameter.detach(), expected.get_parameter(name).detach(), name)
        dist.barrier()

    def _resume(self, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Load under the second plan, the weights from either checkpoint."""
        plan = self.plans[1]
        mesh = device_mesh(plan)
        other = parallelize(on_meta(gpt2), plan, mesh)
        load_checkpoint(other, folder / "weights")
        model = parallelize(on_meta(gpt2), plan, mesh)
        report = load_checkpoint(
            model, folder / "run", rename="model.".__add__, ignored=["optimizer.*"]
        )
        assert report.bytes_read >= sum(p.to_local().nbytes for p in model.parameters())
        check_same(model, other)
        optimizer = optimizer_of(model)
        weights, state = get_state_dict(model, optimizer)
        dcp.load(dcp_state_dict({"optimizer": state}), checkpoint_id=folder / "run")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return model, optimizer


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # So large an eps that gradients near zero count for little, whatever their sign.
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> None:
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class FailedSave:
    """Saving fails on all ranks if it fails on one."""

    def prepare(self) -> None:
        self.plan = plan_of(gpt2, THIRDS, SQUARE)

    def __call__(self) -> None:
        model = parallelize(gpt2()[0], self.plan, device_mesh(self.plan))
        with shared_folder() as folder:
            Path(folder, "file").touch()
            place = Path(folder, "file" if dist.get_rank() == 1 else "good")
            complaint = "File exists" if dist.get_rank() == 1 else "failed on another rank"
            with pytest.raises(CheckpointError, match=complaint):
                save_checkpoint(model, place)
            place = Path(folder, f"own{dist.get_rank()}")
            complaint = "is not the same folder on all ranks"
            with pytest.raises(CheckpointError, match=complaint):
                save_checkpoint(model, place, max_file_bytes=500_000)
            complaint = "out of memory" if dist.get_rank() == 0 else "failed on another rank"
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 0:
                    patch.setattr(FileWriter, "begin", run_out_of_memory)
                with pytest.raises(CheckpointError, match=complaint):
                    save_checkpoint(model, Path(folder, "full"))
            dist.barrier()
            assert not list(Path(folder).rglob("*.safetensors*"))


def run_out_of_memory(_writer: FileWriter) -> None:
    raise torch.OutOfMemoryError("out of memory")


def unequal_slices() -> None:
    """Ranks hold slices of unequal length, of a module that no plan was made for."""
    mesh = init_device_mesh(DEVICE, (NUM_RANKS,))
    saved = distributed(nn.Linear(7, 10), mesh, 0)
    assert {len(saved.weight.to_local())} == {1 if dist.get_rank() == 3 else 3}
    for save in (save_checkpoint, save_distributed):
        loaded = distributed(nn.Linear(7, 10), mesh, 1)
        with shared_folder() as folder:
            save(saved, folder)
            load_checkpoint(loaded, folder)
        check_same(loaded, saved)


def distributed(module: nn.Linear, mesh: DeviceMesh, dim: int) -> nn.Linear:
    """A layer whose weight is cut along a dim, and whose bias along its only one."""
    for name, cut in (("weight", dim), ("bias", 0)):
        tensor = distribute_tensor(module.get_parameter(name).detach(), mesh, [Shard(cut)])
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def sums_over_ranks() -> None:
    """What is not summed yet is neither saved nor loaded."""
    mesh = init_device_mesh(DEVICE, (NUM_RANKS,))
    model = nn.Linear(2, 3, bias=False)
    parts = DTensor.from_local(torch.ones(3, 2), mesh, [Partial()])
    model.weight = nn.Parameter(parts)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            save_checkpoint(nn.Linear(2, 3, bias=False), folder)
        dist.barrier()
        with pytest.raises(LayoutError, match="a sum over ranks"):
            load_checkpoint(model, folder)
        with pytest.raises(LayoutError, match="a sum over ranks"):
            save_checkpoint(model, Path(folder, "other"))
        dist.barrier()
        assert not list(Path(folder, "other").iterdir())


def save_distributed(model: nn.Module, folder: str) -> None:
    dcp.save(dcp_state_dict(model.state_dict()), checkpoint_id=folder)


CASES: dict[str, Callable[[], None]] = {
    "thirds, from several files": Load(gpt2, THIRDS, as_index),
    "reversed, from several files": Load(gpt2, REVERSED, as_index),
    "whole, from several files": Load(gpt2, WHOLE, as_index),
    "columns, from a file of another dtype": Load(llama, COLUMNS, as_file, cast=True),
    "thirds, from a file of torch": Load(gpt2, THIRDS, as_torch_file, rename="model.".__add__),
    "rotary table": RotaryTable(),
    "resume": Resume(),
    "unequal slices": unequal_slices,
    "sums over ranks": sums_over_ranks,
    "failed save": FailedSave(),
}
