"""Requests with a config of transformers in place of a graph."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from autoshard.client import Client
from autoshard.errors import OptionError, RequestRejectedError
from autoshard.graph import graph_from_json
from autoshard.plan import Plan
from autoshard.requests.model_configs import BatchShape
from autoshard_server import Settings
from autoshard_server.configs import ConfigExport
from autoshard_server.problems import ServerError
from autoshard_server.solvers.parsers import Parsers

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
MODEL: dict[str, Any] = {"config": LLAMA, "batch_size": 4, "seq_length": 32}
WAIT = {"Prefer": "wait=60"}


def ask(service: Any, path: str = "/v1/plans", **fields: Any) -> httpx2.Response:
    body = {**MODEL, "mesh": {"shape": [2, 2]}, **fields}
    asked = {name: value for name, value in body.items() if value is not None}
    response: httpx2.Response = service.http.post(path, json=asked, headers=WAIT)
    return response


def expect(response: httpx2.Response, kind: str, *words: str, status: int = 422) -> None:
    problem = response.json()
    assert response.status_code == status, response.text
    assert problem["type"].endswith(f"#{kind}"), response.text
    for word in words:
        assert word in problem["detail"]


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tasks of parser processes of the test."""
    found: list[str] = []
    run = Parsers.run

    def noted(self: Parsers, task: Any, *given: Any) -> bytes:
        found.append(task)
        return run(self, task, *given)

    monkeypatch.setattr(Parsers, "run", noted)
    return found


def test_a_config_is_exported_once_for_all_requests_about_it(
    service: Any, tasks: list[str]
) -> None:
    expect(ask(service, "/v1/plans:lookup"), "not-found", "no such request", status=404)
    made = ask(service)
    assert made.status_code == 200, made.text
    plan = Plan.from_json(made.content)
    assert (plan.found, plan.graph.precision) == (True, "bfloat16")
    assert tasks == ["export_config", "describe_graph"]
    again = ask(service)
    assert (again.headers["Autoshard-Cache"], again.content) == ("hit", made.content)
    assert ask(service, "/v1/plans:lookup").json() == {"id": plan.id}
    assert ask(service, mesh={"shape": [4]}).status_code == 200
    searched = ask(service, "/v1/searches", mesh=None, num_devices=2)
    assert searched.status_code == 200, searched.text
    assert ask(service, "/v1/operators:coverage").json()["operators"]
    assert tasks.count("export_config") == 1


def test_clients_plan_configs_at_a_service_and_in_this_process(service: Any) -> None:
    asked: Any = {**MODEL, "mesh": (2, 2)}
    with Client(service.url, cache=False) as client:
        result = client.request_plan(**asked)
    assert result.plan is not None
    # Of a graph that is exported here, the plan has the same id.
    assert Client.local(cache=False).plan(**asked).id == result.plan.id


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give one of a model and config="),
        ({"model": b"", "config": LLAMA}, "give one of a model and config="),
        ({"model": b"", "seq_length": 3}, "seq_length is for config="),
        ({"config": LLAMA, "seq_length": 999}, "128 positions at most"),
        ({"config": LLAMA, "batch_size": 0}, "batch_size is 0"),
        ({"config": "nothing.json"}, "there is no file nothing.json"),
    ],
)
def test_clients_refuse_what_is_no_request(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Client.local(cache=False).plan(**given, mesh=(2,))


def test_a_graph_that_was_deleted_is_made_again(service: Any, tasks: list[str]) -> None:
    assert ask(service).status_code == 200
    # Other tests of the file have made graphs, and may have deleted some.
    graphs = {
        event["resource"]
        for event in service.http.get("/v1/audit", params={"page_size": 100}).json()["events"]
        if event["resource"].startswith("/v1/graphs/")
    }
    assert 204 in {service.http.delete(graph).status_code for graph in graphs}
    # The plan is known without it, another one needs it.
    tasks.clear()
    assert ask(service).headers["Autoshard-Cache"] == "hit"
    assert tasks == []
    assert ask(service, mesh={"shape": [8]}).status_code == 200
    assert tasks == ["export_config"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": None}, ("no text 'model_type'",)),
        ({"model_type": ["llama"]}, ("no text 'model_type'",)),
        ({"auto_map": {"AutoConfig": "a--b.c"}}, ("'auto_map' names code",)),
        ({"text_config": {"auto_map": {}}}, ("'auto_map' names code",)),
        ({"trust_remote_code": True}, ("'trust_remote_code' names code",)),
        ({"attn_implementation": "somebody/kernels"}, ("'attn_implementation' names code",)),
        ({"vocab_size": -3}, ("'vocab_size' is negative",)),
        ({"num_hidden_layers": -1}, ("'num_hidden_layers' is negative",)),
        ({"num_attention_heads": -4}, ("'num_attention_heads' is negative",)),
        ({"max_position_embeddings": 16}, ("length is 32", "16 positions at most")),
    ],
)
def test_what_arithmetic_refuses_is_refused_before_a_process_is_started(
    service: Any, tasks: list[str], config: dict[str, Any], words: tuple[str, ...]
) -> None:
    for path in ("/v1/plans", "/v1/plans:lookup", "/v1/operators:coverage"):
        expect(ask(service, path, config=LLAMA | config), "config", *words)
    searched = ask(service, "/v1/searches", config=LLAMA | config, mesh=None, num_devices=2)
    expect(searched, "config", *words)
    assert set(tasks) <= {"check_search"}


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        ({"num_hidden_layers": 1_000_000}, "LAYERS"),
        ({"num_hidden_layers": 1e6}, "LAYERS"),
        ({"text_config": [[{"n_layer": 10**4000}]]}, "LAYERS"),
        ({"num_labels": 10**7}, "COUNT"),
        ({"hidden_size": 10**9}, "NUMBER"),
        ({"vocab_size": 10**30}, "NUMBER"),
    ],
)
def test_large_numbers_are_refused_by_name(
    service: Any, tasks: list[str], config: dict[str, Any], setting: str
) -> None:
    expect(ask(service, config=LLAMA | config), "limit", f"AUTOSHARD_MAX_CONFIG_{setting}")
    assert tasks == []


def test_one_layer_number_too_large_among_very_many_values_is_found() -> None:
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    many = {"deep": nested, "layer_types": ["x"] * 99_000, "num_layers": [9] * 900 + [10**6]}
    settings = Settings(store_url="sqlite://")
    with pytest.raises(ServerError, match="num_layers"):
        ConfigExport(LLAMA | many, BatchShape(), None, "training", settings)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "nobody"}, ("model type `nobody`",)),
        ({"model_type": "../../etc"}, ("no config of transformers",)),
        ({"hidden_size": "64"}, ("hidden_size",)),
        ({"architectures": ["Trainer"]}, ("transformers has no model 'Trainer'",)),
        ({"architectures": ["os.system"]}, ("transformers has no model 'os.system'",)),
        ({"architectures": [["a"]]}, ("no config of transformers",)),
        ({"hidden_size": 0}, ("no config of transformers",)),
        ({"dtype": "load"}, ("no config of transformers",)),
        ({"hidden_act": "no"}, ("no config of transformers",)),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, ("only models of text",)),
    ],
)
def test_a_config_without_a_model_is_refused_in_its_process(
    service: Any, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    expect(ask(service, config=LLAMA | fields), "config", *words)


def test_a_batch_is_that_of_a_step_in_all_its_micro_batches(service: Any) -> None:
    made = ask(service, options={"training": {"micro_batches": 2}})
    assert made.status_code == 200, made.text
    plan = Plan.from_json(made.content)
    program = graph_from_json(plan.stages[0].program)
    assert program.values[program.inputs[-1].name].shape[0] == MODEL["batch_size"] // 2
    uneven = ask(service, options={"training": {"micro_batches": 3}})
    expect(uneven, "config", "does not divide the batch of a step, 4 samples")


@pytest.mark.thorough
def test_quantization_is_not_read(service: Any) -> None:
    quantized = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "x": 4}}
    made = ask(service, config=quantized)
    assert made.json()["id"] == ask(service).json()["id"]


@pytest.mark.parametrize(
    ("fields", "pointer", "word"),
    [
        ({"graph_sha256": "0" * 64}, "", "one of graph_sha256 and config"),
        ({"config": None}, "", "one of graph_sha256 and config"),
        ({"config": None, "graph_sha256": "0" * 64}, "", "batch_size is for a config"),
        ({"config": []}, "/config", ""),
        ({"batch_size": 0}, "/batch_size", ""),
        ({"seq_length": -1}, "/seq_length", ""),
        ({"batch_size": 10**30}, "/batch_size", ""),
        ({"dtype": "int8"}, "/dtype", ""),
    ],
)
def test_a_request_has_a_graph_or_a_config(
    service: Any, fields: dict[str, Any], pointer: str, word: str
) -> None:
    response = ask(service, **fields)
    expect(response, "request", word)
    assert pointer in {error["pointer"] for error in response.json()["errors"]}


def test_what_cannot_be_planned_is_refused_before_the_config_is_exported(
    service: Any, tasks: list[str]
) -> None:
    expect(ask(service, seq_length=16, mesh={"shape": [0]}), "mesh")
    expect(ask(service, seq_length=16, options={"solver": {"name": "GUROBI"}}), "options")
    few = ask(service, "/v1/searches", seq_length=16, mesh=None, num_devices=0)
    expect(few, "request")
    assert "export_config" not in tasks


def test_without_the_extra_the_reason_and_ways_out_are_said(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("service", "configs"):
        monkeypatch.setattr(f"autoshard_server.{place}.transformers_version", lambda: None)
    words = ("has no transformers", "autoshard[configs]", "CONFIGS=1", "send a graph")
    expect(ask(service), "not-installed", *words, status=501)
    with Client(service.url) as client, pytest.raises(RequestRejectedError, match="transformers"):
        client.plan(config=LLAMA, batch_size=2, seq_length=8, mesh=(2,))


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        ({"max_export_bytes": 1 << 20}, "AUTOSHARD_MAX_EXPORT_BYTES"),
        ({"max_export_seconds": 1e-3}, "AUTOSHARD_MAX_EXPORT_SECONDS"),
    ],
)
def test_an_export_over_a_limit_is_stopped(
    start_service: Any, limit: dict[str, Any], name: str
) -> None:
    service = start_service(num_workers=0, **limit)
    expect(ask(service), "limit", name)
    assert service.is_up()


def test_files_network_and_programs_are_refused_while_a_model_is_made() -> None:
    subprocess.run([sys.executable, "-c", CONFINED], check=True)  # noqa: S603  our own program


CONFINED = """
import pickle, socket, subprocess, tempfile
from pathlib import Path
import json.tool
from autoshard_server.solvers.confinement import confine

outside = Path(tempfile.mkdtemp()) / "file"
outside.write_text("text")
pickled = pickle.dumps(Path)
confine()
assert Path(json.tool.__file__).read_text()
attempts = [
    lambda: outside.read_text(),
    lambda: outside.with_name("other").write_text("text"),
    lambda: Path(json.tool.__file__).open("a"),
    lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: socket.getaddrinfo("example.org", 80),
    lambda: subprocess.run(["true"]),
    lambda: pickle.loads(pickled),
    lambda: outside.unlink(),
]
for attempt in attempts:
    try:
        attempt()
    except PermissionError as error:
        assert "refused here" in str(error), error
    else:
        raise SystemExit(f"allowed: {attempts.index(attempt)}")
"""
