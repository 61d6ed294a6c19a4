"""`autoshard demo`: from export to a sharded run, on one machine without GPU.

A full-size GPT-2 is exported on the meta device and planned by a service, which is started for the
demo; a second request gets the plan from its cache. Then a small GPT-2 runs sharded on 4 gloo ranks
and is compared with the unsharded model.
"""

import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from autoshard.base.extras import from_extra
from autoshard.base.quantities import format_bytes
from autoshard.cli.rendering.plan_output import print_summary
from autoshard.client import Client
from autoshard.errors import ServiceUnavailableError
from autoshard.graph import export_model
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Plan
from autoshard.runtime import full_tensor, parallelize, record_collectives, summarize

BATCH, SEQUENCE = 8, 1024
RANKS_SHAPE = (2, 2)
_TOLERANCE = 1e-5


def run_demo(console: Console) -> None:
    """Plan twice, the second time from the cache; run on ranks, and compare.

    Raises:
        MissingPackageError: transformers, or a package of the service, is not installed.
    """
    with from_extra("server"):
        import_module("autoshard_server.serve")
    console.rule("GPT-2, 12 layers, exported on the meta device")
    archive = export_gpt2()
    console.print(f"the graph has {format_bytes(len(archive))}; the weights are not needed")
    with tempfile.TemporaryDirectory() as folder:
        with service(Path(folder)) as url:
            console.rule(f"Planned by the service at {url}, mesh 2x4")
            _plan_twice(console, url, archive)
        console.rule("A small GPT-2 on 4 gloo ranks, mesh 2x2")
        _run_ranks(console, Path(folder))


def _plan_twice(console: Console, url: str, archive: bytes) -> None:
    with Client(url) as client:
        for attempt in ("first", "second"):
            start = time.perf_counter()
            result = client.request_plan(archive, mesh=(2, 4))
            seconds = time.perf_counter() - start
            if attempt == "first" and result.plan is not None:
                print_summary(result.plan)
            source = "answered from the cache" if result.cached else "solved"
            console.print(f"{attempt} request: {source} in {seconds:.3f} s", style="bold green")


def export_gpt2() -> bytes:
    """Export GPT-2 (124 million parameters) for a batch of 8 x 1024 tokens with labels."""
    config_class, model_class = _gpt2_classes()
    with torch.device("meta"):
        model = model_class(config_class())
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return export_model(model, (), {"input_ids": ids, "labels": ids, "use_cache": False})


def _gpt2_classes() -> tuple[Any, Any]:
    with from_extra("transformers"):
        from transformers import GPT2Config, GPT2LMHeadModel, utils  # noqa: PLC0415  an extra
    utils.logging.set_verbosity_error()
    return GPT2Config, GPT2LMHeadModel


@contextmanager
def service(folder: Path, *flags: str) -> Iterator[str]:
    """Start a planning service with its cache in `folder`; yields its URL.

    Args:
        folder: for its database.
        *flags: of its command line.

    Raises:
        ServiceUnavailableError: it does not answer within a minute.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = f"sqlite:///{folder / 'cache.sqlite3'}"
    command = [sys.executable, "-m", "autoshard_server", "--port", str(port), "--store-url", store]
    process = subprocess.Popen([*command, "--log-level", "warning", *flags])  # noqa: S603  our own program
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    with Client(url) as client:
        for _ in range(600):
            if process.poll() is not None:
                raise ServiceUnavailableError(f"the service ended with {process.returncode}")
            with suppress(ServiceUnavailableError):
                client.health()
                return
            time.sleep(0.1)
    raise ServiceUnavailableError(f"the service at {url} did not answer within a minute")


def small_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Make a small GPT-2 and a batch for it, the same on every rank."""
    config_class, model_class = _gpt2_classes()
    torch.manual_seed(0)
    config = config_class(
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=32,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = torch.randint(0, 256, (8, 32))
    return model_class(config), {"input_ids": ids, "labels": ids, "use_cache": False}


def demo_mesh() -> Mesh:
    """Make a mesh of four slow devices, on which even a small model is worth sharding."""
    mesh = make_mesh(RANKS_SHAPE, topology="cpu-100gbe")
    device = replace(
        mesh.topology.device,
        name="one slow core",
        peak_flops={"float32": 1e9},
        memory_bandwidth=1e9,
        launch_overhead=0.0,
    )
    source = "synthetic figures for the demo"
    topology = replace(mesh.topology, name="four slow cores", device=device, source=source)
    return Mesh(mesh.axes, topology)


def _run_ranks(console: Console, folder: Path) -> None:
    model, batch = small_gpt2()
    with Client.local(cache=False) as client:
        plan = client.plan(model, (), batch, mesh=demo_mesh())
    print_summary(plan)
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    start = time.perf_counter()
    spawn(_rank, args=(str(folder),), nprocs=4)  # type: ignore[no-untyped-call]  # torch's own
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    console.print(
        f"4 ranks, {time.perf_counter() - start:.0f} s with start-up\n"
        f"loss, sharded minus unsharded:            {report['loss']:+.2e}\n"
        f"largest difference of {report['num_gradients']} gradients:      "
        f"{report['gradient']:.2e}\n"
        f"collectives executed equal those planned: {report['collectives_equal']}",
        style="bold green",
    )
    if not report["collectives_equal"] or max(abs(report["loss"]), report["gradient"]) > _TOLERANCE:
        raise SystemExit("the sharded model does not equal the unsharded one")


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    # Gathering whole gradients to compare them takes several steps, as DTensor points out.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    plan = Plan.from_json((Path(folder) / "plan.json").read_bytes())
    axes = tuple(axis.name for axis in plan.mesh.axes)
    device_mesh = init_device_mesh("cpu", RANKS_SHAPE, mesh_dim_names=axes)
    expected_model, batch = small_gpt2()
    expected = expected_model(**batch).loss
    expected.backward()
    model = parallelize(small_gpt2()[0], plan, device_mesh)
    with record_collectives(device_mesh) as recorder:
        loss = model(**batch).loss
        loss.backward()
    executed = summarize(recorder.records)
    differences = [
        _largest_difference(parameter, expected_model.get_parameter(name))
        for name, parameter in model.named_parameters()
    ]
    if rank == 0:
        report = {
            "loss": loss.item() - expected.item(),
            "gradient": max(differences),
            "num_gradients": len(differences),
            "collectives_equal": executed == plan.collectives,
        }
        (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.destroy_process_group()


def _largest_difference(parameter: nn.Parameter, expected: nn.Parameter) -> float:
    assert parameter.grad is not None
    assert expected.grad is not None
    return (full_tensor(parameter.grad) - expected.grad).abs().max().item()
