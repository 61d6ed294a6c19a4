"""A digest of a graph depends on the program alone, not on what else the process has done."""

import subprocess
import sys
from collections.abc import Callable
from functools import wraps

import pytest
import torch
from support.models import graph_of
from torch import nn

SCRIPT = """
import torch
from support.models import bert, gpt2, graph_of, meta
from autoshard.graph import graph_digest
digests = {build: graph_digest(graph_of(meta(build))) for build in ORDER}
print(digests[gpt2], digests[bert])
"""


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square()


def scaling(kind: type[Scaled]) -> type[Scaled]:
    """A decorator whose functions all have the same code, as those of transformers."""
    forward: Callable[..., torch.Tensor] = kind.forward

    @wraps(forward)
    def scaled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) * kind.scale

    kind.forward = scaled  # type: ignore[method-assign]
    return kind


@scaling
class First(Scaled):
    scale = 2.0


@scaling
class Second(Scaled):
    scale = 3.0


class Both(nn.Module):
    """Reads one of two classes, and holds the other."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = {"first": First, "second": Second}
        self.layer = First()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * len(self.kinds)


def test_of_functions_with_the_same_code_those_that_run_are_read() -> None:
    graph = graph_of((Both(), {"x": torch.ones(2, 4)}))
    decorated = {path for path in graph.model.state if "forward.__closure__.kind" in path}
    assert [path for path in decorated if "First" in path]
    assert not [path for path in decorated if "Second" in path]


@pytest.mark.thorough
def test_it_is_the_same_in_any_process() -> None:
    found = {
        subprocess.run(  # noqa: S603  this Python
            [sys.executable, "-c", SCRIPT.replace("ORDER", order)],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order, seed in (("(gpt2, bert)", "1"), ("(bert, gpt2)", "2"))
    }
    assert len(found) == 1, found
