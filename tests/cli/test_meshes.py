"""Meshes, nodes, topologies and amounts of memory on the command line."""

import json
from dataclasses import replace
from pathlib import Path
from shlex import split

import pytest
from support.command_line import autoshard
from support.services import serving

from autoshard.client import Client
from autoshard.mesh import get_topology, list_topologies, make_mesh
from autoshard.plan import Plan
from autoshard_server import ThreadExecutor
from autoshard_server.solvers.solving import solve


def planned(archive: Path, *arguments: str) -> Plan:
    result = autoshard("plan", archive, "--json", "--quiet", *arguments)
    assert result.exit_code == 0, result.output
    return Plan.from_json(result.stdout)


def test_a_plan_has_the_nodes_that_were_asked_for(archive: Path) -> None:
    plan = planned(archive, "--mesh", "dp=2,tp=4", "--topology", "H100", "--nodes", "2")
    assert plan.mesh == make_mesh((2, 4), axes=("dp", "tp"), topology="h100-sxm", gpus_per_node=4)
    assert plan.mesh.description == (
        "2 nodes x 4 NVIDIA H100 SXM (NVLink 450 GB/s; 50 GB/s a device between nodes)"
    )
    silent = planned(archive, "--mesh", "2x2", "--memory", "70GB")
    assert silent.mesh.description.endswith("assumed: h100-sxm (no topology given)")
    assert silent.options.memory.budget == 70 * 10**9
    links = ("--intra-bandwidth", "450GB/s", "--inter-bandwidth", "400Gb/s")
    levels = planned(archive, "--mesh", "4", "--gpus-per-node", "2", *links).mesh.topology.levels
    assert [(link.size, link.bandwidth) for link in levels] == [(2, 450e9), (None, 50e9)]


def test_every_mesh_of_a_search_has_the_nodes(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best.json"
    nodes = ("--devices", "4", "--max-axes", "1", "--nodes", "2", "--topology", "h100")
    searched = autoshard("search", archive, *nodes, "-o", path)
    assert searched.exit_code == 0
    best = Plan.from_json(path.read_bytes()).mesh
    assert best.num_nodes == 2
    # The command under Next plans this mesh.
    monkeypatch.chdir(tmp_path)
    (command,) = searched.output.partition("Next:\n")[2].splitlines()
    program, *arguments = split(command)
    assert (program, autoshard(*arguments).exit_code) == ("autoshard", 0)
    assert Plan.load("plan.json").mesh == best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "2x"), "'2x' is not a mesh; write the size of each axis"),
        (("--mesh", "2x4", "--nodes", "3"), "possible numbers of nodes x devices: 1 x 8, 2 x 4"),
        (("--mesh", "2x4", "--topology", "a100-80gb"), "could be a100-pcie-80gb or a100-sxm-80gb"),
        (("--mesh", "2x4", "--topology", "h10"), "did you mean h100-sxm?"),
        (("--mesh", "2x4", "--intra-bandwidth", "450G"), "write 450GB/s or 450Gb/s"),
        (("--mesh", "2x4", "--memory", "80"), "80 is 80 bytes; did you mean 80GB?"),
        (("--mesh", "2x4", "--memory", "81920"), "did you mean 81920MB?"),
        (("--mesh", "2x4", "--memory", "500000"), "500000 bytes; give a unit, such as 80GB"),
        (("--mesh", "2x4", "--memory", "lots"), "'lots' is not a number of bytes above 0"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(
    archive: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = autoshard("plan", archive, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.thorough
def test_a_budget_in_a_wrong_unit_gets_a_remark(archive: Path) -> None:
    result = autoshard("plan", archive, "--mesh", "2x4", "--memory", "80B", "--json", "--quiet")
    assert "80 bytes per device (did you mean 80GB?)" in Plan.from_json(result.stdout).reason


def test_topologies_are_listed() -> None:
    result = autoshard("topologies")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == ["name", *list_topologies()]
    line = next(line for line in result.stdout.splitlines() if line.startswith("h100-sxm"))
    for text in ("NVIDIA H100 SXM", "80 GB", "989 TFLOP/s", "NVLink 450 GB/s, network 50 GB/s"):
        assert text in line
    documents = json.loads(autoshard("topologies", "--json").stdout)
    assert [document["name"] for document in documents] == list(list_topologies())


def test_stored_topologies_of_a_service_are_listed(tmp_path: Path) -> None:
    ours = replace(get_topology("h100-sxm"), name="ours")
    with serving(ThreadExecutor(solve)) as url:
        with Client(url, cache=False) as client:
            client.put_topology(ours)
        listed = autoshard("topologies", "--server", url, "--cache", tmp_path).stdout
    assert any(line.startswith("ours ") for line in listed.splitlines())
