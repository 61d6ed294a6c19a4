"""Values of constants that a plan brings along."""

import torch

from autoshard.graph import Graph


def constant_value(graph: Graph, name: str, device: torch.device) -> torch.Tensor | None:
    """A constant on a device; None where the graph does not say its value.

    Args:
        graph: the program.
        name: of the constant's input.
        device: where it is needed.
    """
    contents = next((i.contents for i in graph.inputs if i.name == name), None)
    if contents is None:
        return None
    tensor = graph.values[name]
    elements = torch.frombuffer(bytearray(contents) or bytearray(1), dtype=torch.uint8)
    elements = elements[: len(contents)].view(getattr(torch, tensor.dtype))
    return elements.view(tensor.shape).to(device)
