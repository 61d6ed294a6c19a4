"""Every limit of the service: declared, documented, counted, with an alert, and attacked."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoshard_server import Settings, ThreadExecutor
from autoshard_server.generate import settings_page
from autoshard_server.limits import LIMITS, REFUSING_NOTHING, Limited, limit_name
from autoshard_server.solvers.solving import solve
from autoshard_server.telemetry import limits_reached_total

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

MESH = {"mesh": {"shape": [2, 2]}}

ELSEWHERE = {
    "max_header_bytes": "http/test_connections.py::test_headers_that_are_too_large_are_refused",
    "max_headers": "http/test_connections.py::test_headers_that_are_too_large_are_refused",
    "header_timeout": "http/test_connections.py::test_a_header_that_does_not_end_is_refused",
    "transfer_timeout": "http/test_connections.py::test_a_body_that_trickles_is_refused",
    "max_connections": "http/test_connections.py::test_idle_connections_give_way_to_new_ones",
    "max_address_connections": "http/test_connections.py"
    "::test_an_address_with_too_many_connections_is_refused_but_not_others",
    "max_invalid_keys": "http/test_connections.py"
    "::test_an_address_that_sends_invalid_keys_has_to_wait",
    "max_model_values": "solvers/test_parsers.py"
    "::test_many_values_and_high_ratios_are_refused_by_name",
    "max_compression_ratio": "solvers/test_parsers.py"
    "::test_many_values_and_high_ratios_are_refused_by_name",
    "max_bodies_bytes": "solvers/test_parsers.py"
    "::test_many_values_and_high_ratios_are_refused_by_name",
    "max_parse_seconds": "solvers/test_parsers.py"
    "::test_a_parser_over_a_limit_is_stopped_and_replaced",
    "max_parse_bytes": "solvers/test_parsers.py"
    "::test_a_parser_over_a_limit_is_stopped_and_replaced",
    "max_project_parses": "test_strangers.py::test_a_queue_of_graphs_has_an_end",
    "max_project_parse_bytes": "test_strangers.py::test_a_queue_of_graphs_has_an_end",
    "max_parses": "test_strangers.py::test_a_queue_of_graphs_has_an_end",
    "max_export_seconds": "routes/test_configs.py::test_an_export_over_a_limit_is_stopped",
    "max_export_bytes": "routes/test_configs.py::test_an_export_over_a_limit_is_stopped",
    "max_caller_jobs": "http/test_auth.py::test_a_caller_can_have_so_many_jobs",
    "max_caller_job_bytes": "test_strangers.py::test_what_is_cancelled_is_stored_no_longer",
    "max_project_records": "test_strangers.py::test_records_of_a_day_are_limited",
    "max_caller_waits": "test_strangers.py::test_waiting_requests_are_limited",
    "max_caller_streams": "routes/test_jobs.py::test_a_caller_has_so_many_streams_open_at_once",
    "max_edges": "routes/test_graphs.py::test_limits_are_named",
    "max_topologies": "routes/test_topologies.py::test_sizes_and_numbers_have_limits",
    "max_topology_bytes": "routes/test_topologies.py::test_sizes_and_numbers_have_limits",
    "max_job_bytes": "solvers/test_workers.py::test_a_solve_over_its_memory_limit_fails_alone",
}
"""Limits that other tests attack."""


def upload(service: Any, graph: bytes) -> Any:
    return service.post(graph, MESH, wait=60)


def twice(service: Any, graph: bytes) -> Any:
    service.post(graph, MESH)
    return service.post(graph, {"mesh": {"shape": [4]}})


def search(service: Any, _graph: bytes) -> Any:
    body = {"graph_sha256": "0" * 64, "num_devices": 64}
    return service.http.post("/v1/searches", json=body)


def config(service: Any, _graph: bytes) -> Any:
    sizes = {"model_type": "gpt2", "n_layer": 2, "num_labels": 3, "vocab_size": 100}
    return service.http.post("/v1/plans", json={"config": sizes, **MESH})


def long_plan(service: Any, graph: bytes) -> Any:
    return service.post(graph, {**MESH, "options": {"solver": {"time_limit": 11}}})


def wait_for_two(service: Any, graph: bytes) -> Any:
    with ThreadPoolExecutor(2) as pool:
        meshes = ({"mesh": {"shape": [size]}} for size in (2, 4))
        asked = [pool.submit(service.post, graph, mesh, wait=3) for mesh in meshes]
        return max((one.result() for one in asked), key=lambda answer: answer.status_code)


Attack = Callable[[Any, bytes], Any]

ATTACKS: dict[str, tuple[float, Attack]] = {
    "max_body_bytes": (1000, upload),
    "max_model_bytes": (1000, upload),
    "max_nodes": (1, upload),
    "max_mesh_axes": (1, upload),
    "max_devices": (3, upload),
    "max_search_meshes": (1, search),
    "max_request_bytes": (10, search),
    "max_request_values": (1, search),
    "max_config_layers": (1, config),
    "max_config_count": (1, config),
    "max_config_number": (1, config),
    "max_time_limit": (10, long_plan),
    "max_project_jobs": (1, twice),
    "max_queued_jobs": (1, twice),
    "max_waits": (1, wait_for_two),
    "max_strategies": (10, upload),
    "max_job_seconds": (1e-3, upload),
}
"""Low values of the other limits, and a request that exceeds each."""


def reached(setting: str) -> float:
    counter = limits_reached_total.labels(limit_name(setting), LIMITS[setting])
    return float(next(iter(counter.collect())).samples[0].value)


@pytest.mark.parametrize("setting", ATTACKS)
def test_a_limit_holds_and_is_counted(
    start_service: Any, graph: bytes, setting: str, program: Any
) -> None:
    value, attack = ATTACKS[setting]
    executor = program("hang") if setting == "max_job_seconds" else ThreadExecutor(solve)
    num_workers = 1 if LIMITS[setting] is Limited.JOB else 0
    service = start_service(executor=executor, num_workers=num_workers, **{setting: value})
    before = reached(setting)
    answer = attack(service, graph)
    assert answer.status_code >= 400
    assert (answer.json()["limit_name"], answer.json()["limit"]) == (limit_name(setting), value)
    assert reached(setting) == before + 1
    assert service.is_up()


def test_every_setting_that_limits_is_declared() -> None:
    named = {
        name
        for name in Settings.model_fields
        if re.search(r"(^|_)max_|_timeout$", name) and name not in REFUSING_NOTHING
    }
    assert named == set(LIMITS)
    assert set(Settings.model_fields) >= REFUSING_NOTHING
    assert not REFUSING_NOTHING & set(LIMITS)


@pytest.mark.parametrize("setting", LIMITS)
def test_every_limit_has_a_default_a_line_an_alert_and_an_attack(setting: str) -> None:
    field = Settings.model_fields[setting]
    assert field.default is not None
    assert field.description
    page = settings_page()
    assert f"| `{limit_name(setting)}` | `{field.default}` |" in page
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {LIMITS[setting]} | "))
    assert f"`{limit_name(setting)}`" in row
    (rule,) = (rule for rule in rules() if f"`{rule['alert']}`" in row)
    assert f'autoshard_limits_reached_total{{of="{LIMITS[setting]}"}}' in rule["expr"]
    assert "by (limit)" in rule["expr"]
    assert (setting in ATTACKS) is not (setting in ELSEWHERE)


def rules() -> list[dict[str, Any]]:
    text = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text("utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)["groups"][0]["rules"]
    return found


@pytest.mark.parametrize("setting", ELSEWHERE)
def test_what_attacks_a_limit_elsewhere_exists_and_names_it(setting: str) -> None:
    file, _, name = ELSEWHERE[setting].partition("::")
    text = (HERE / file).read_text("utf-8")
    assert f"def {name}(" in text
    assert setting in text.lower()


def test_the_dashboard_and_metrics_show_the_limits(service: Any) -> None:
    dashboard = (ROOT / "deploy" / "grafana" / "autoshard.json").read_text("utf-8")
    assert "sum by (limit, of) (rate(autoshard_limits_reached_total" in dashboard
    text = service.http.get("/metrics").text
    for setting, kind in LIMITS.items():
        assert f'autoshard_limit{{limit="{limit_name(setting)}",of="{kind}"}}' in text
