"""Requests with a config of transformers in place of a graph."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from autoshard.plan import Plan
from autoshard_server import ThreadExecutor
from autoshard_server.service import Service
from autoshard_server.solvers.solving import solve

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
REQUEST: dict[str, Any] = {
    "config": LLAMA,
    "batch_size": 4,
    "seq_length": 32,
    "mesh": {"shape": [2, 2]},
}
WAIT = {"Prefer": "wait=60"}


def ask(service: Any, path: str = "/v1/plans", **fields: Any) -> httpx2.Response:
    response: httpx2.Response = service.http.post(path, json=REQUEST | fields, headers=WAIT)
    return response


@pytest.fixture(scope="module")
def tasks() -> list[str]:
    """Tasks of parser processes."""
    return []


@pytest.fixture(scope="module", autouse=True)
def _counted(tasks: list[str]) -> Iterator[None]:
    from autoshard_server.solvers.parsers import Parsers

    run = Parsers.run

    def counted(self: Parsers, task: Any, *given: Any) -> bytes:
        tasks.append(task)
        return run(self, task, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parsers, "run", counted)
        yield


def test_a_config_is_exported_once_and_its_plan_is_that_of_its_graph(
    service: Any, tasks: list[str]
) -> None:
    unknown = ask(service, "/v1/plans:lookup")
    assert unknown.status_code == 404
    t=time.time()
    made = ask(service)
    print("first", time.time()-t)
    assert made.status_code == 200, made.text
    plan = Plan.from_json(made.content)
    assert plan.found
    print(plan.graph)
    t=time.time()
    again = ask(service)
    print("again", time.time()-t)
    assert again.headers["Autoshard-Cache"] == "hit"
    print(tasks)
    print(ask(service, "/v1/plans:lookup").json())
    r=ask(service, seq_length=4096); print(r.status_code, r.text)
    for k in [dict(auto_map={"AutoConfig":"a--b.c"}), dict(num_hidden_layers=10**6), dict(hidden_size=10**9), dict(architectures=["Trainer"]), dict(architectures=["os.system"]),dict(model_type="nobody"), dict(model_type="../x"), dict(hidden_size="64"), dict(hidden_act="no"), dict(quantization_config={"quant_method":"bitsandbytes","load_in_4bit":True}), dict(vocab_size=-3), dict(num_attention_heads=0), dict(num_labels=2**24), dict(attn_implementation="a/b"), dict(rope_parameters={"rope_type":"x"}), dict(layer_types=["full_attention"]*50000), dict(dtype="load"), dict(pad_token_id=10**6), dict(hidden_size=63), dict(hidden_size=2**24, intermediate_size=2**24)]:
        t=time.time()
        r=ask(service, config=LLAMA|k)
        print(str(k)[:80], r.status_code, round(time.time()-t,3), r.text[:400] if r.status_code!=200 else "")
