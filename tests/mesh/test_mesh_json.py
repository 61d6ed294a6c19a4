import json
from typing import Any

import pytest

from autoshard.errors import MeshError
from autoshard.mesh import AlphaBeta, Mesh, list_topologies, make_mesh, mesh_from_json, mesh_to_json

MESHES = [
    *(make_mesh((2, 4), topology=name) for name in list_topologies()),
    make_mesh((1,), axes=["only"]),
    make_mesh((2, 2, 4), intra_bandwidth=3e11, inter_bandwidth=1e10 / 3),
    Mesh(make_mesh((4,)).axes, make_mesh((4,)).topology, AlphaBeta((1.0,), (0.01,))),
]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: mesh.topology.name)
def test_a_mesh_survives_json(mesh: Mesh) -> None:
    text = mesh_to_json(mesh)
    again = mesh_from_json(text)
    assert again == mesh
    assert hash(again) == hash(mesh)
    assert mesh_to_json(again) == text
    assert mesh_from_json(text.encode()) == mesh


def test_integers_stand_for_floats_but_not_the_reverse() -> None:
    document = json.loads(mesh_to_json(make_mesh((2,))))
    document["topology"]["levels"][0]["bandwidth"] = 450_000_000_000
    assert mesh_from_json(json.dumps(document)) == make_mesh((2,))
    document["axes"][0]["size"] = 2.0
    with pytest.raises(MeshError, match=r"mesh.axes.0.size: Input should be a valid integer"):
        mesh_from_json(json.dumps(document))


def changed(path: list[Any], value: object) -> str:
    document = json.loads(mesh_to_json(make_mesh((2, 4))))
    *parents, last = path
    part = document
    for key in parents:
        part = part[key]
    part[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "mesh: Invalid JSON"),
        ("[]", "mesh: Input should be an object"),
        ("{}", "mesh.axes: Field required; mesh.topology: Field required"),
        (changed(["axes"], []), "mesh: the mesh has no axes"),
        (changed(["axes", 0, "size"], 0), "mesh.axes.0: axis 'axis0' has size 0"),
        (changed(["axes", 0, "size"], "2"), "mesh.axes.0.size: Input should be a valid integer"),
        (changed(["axes", 0, "color"], "red"), "mesh.axes.0.color: Unexpected keyword argument"),
        (changed(["axes", 1, "name"], "axis0"), "mesh: axis 'axis0' is named twice"),
        (changed(["topology"], "h100-sxm"), "mesh.topology: Input should be an object"),
        (changed(["topology", "backend"], "mpi"), "mesh.topology: backend 'mpi' is unknown"),
        (
            changed(["topology", "levels", 1, "bandwidth"], float("nan")),
            "mesh.topology.levels.1: bandwidth of link 'network' is nan",
        ),
        (
            changed(["topology", "device", "memory"], 10**400),
            "mesh.topology.device.memory: Input should be less than",
        ),
        (
            changed(["collectives"], {"alpha": [1.0], "beta": [1.0]}),
            "mesh: alpha and beta have 1 entries, but the mesh has 2 axes",
        ),
    ],
)
def test_a_wrong_document_is_refused_by_field(document: str, message: str) -> None:
    with pytest.raises(MeshError) as raised:
        mesh_from_json(document)
    assert message in str(raised.value)
