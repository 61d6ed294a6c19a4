"""Files that are neither graphs nor plans, and what is said of each in place of a graph."""

import pickle
from io import BytesIO

import pytest
import torch
from safetensors.torch import save

from autoshard.mesh import get_topology, topology_to_json


class Canary:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a pickle was opened",)


def saved(value: object, *, is_zip: bool) -> bytes:
    file = BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


OTHERS = {
    "empty.pt2": (b"", "is empty"),
    "blank.pt2": (b" \n", "is empty"),
    "model.safetensors": (save({"w": torch.zeros(2)}), "weights (safetensors)"),
    "model.safetensors.index.json": (
        b'{"weight_map": {}}',
        "index of a checkpoint",
    ),
    "model.gguf": (b"GGUF\3\0\0\0", "GGUF"),
    "model.h5": (b"\x89HDF\r\n\x1a\n", "HDF5"),
    "state.pt": (saved({"w": torch.zeros(2), "x": Canary()}, is_zip=True), "pickled checkpoint"),
    "old.pth": (saved({"w": torch.zeros(2), "x": Canary()}, is_zip=False), "pickled checkpoint"),
    "plain.pkl": (pickle.dumps(Canary()), "pickled checkpoint"),
    "config.json": (b'{"model_type": "gpt2", "n_layer": 2}', "AutoModelForCausalLM.from_config"),
    "model.onnx": (b"\x08\x08\x12\x07pytorch\x1a\x032.0", "ONNX"),
    "train.py": (b"import torch\n\nprint('training')\n", "a Python program"),
    "topology.json": (topology_to_json(get_topology("h100-sxm")).encode(), "--topology"),
    "other.json": (b'{"a": 1}', "JSON file of another kind"),
    "list.json": (b"[1, 2]", "JSON file of another kind"),
    "notes.txt": (b"call mum at six\n", "a text file"),
    "noise.bin": (bytes(range(1, 255)), "a binary file of an unknown kind"),
    "cut.json": (b'{"certificate": {', "damaged or cut short"),
}
