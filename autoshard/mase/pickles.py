"""MASE's `ilp_solution.pkl`, which is a pickle.

A pickle is a program: whoever wrote it decides which functions run when it is read. Never read
one that somebody else sent, and never one from the network or a shared folder. It is read here
only from a file that the user names and vouches for. As a second line of defence it may name
nothing but DTensor's placements, of which a solution consists; a file that names anything else
is refused before that runs. A file can still be made to use up the memory.

MASE writes with dill, whose files are plain pickles as long as they hold nothing but that. What
is written here can be read by MASE, with dill.
"""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoshard.errors import OptionError, PlanError
from autoshard.layouts import layout_of_texts, to_placements
from autoshard.mase.solution import MaseNode, MaseSolution, Placements

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_MODULES: Final = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",  # where torch had them before 2.5
)
_CLASSES: Final = ("Shard", "Replicate", "Partial", "_StridedShard")


class _Placements(pickle.Unpickler):
    """Reads pickles of placements in plain containers."""

    def find_class(self, module: str, name: str) -> type:
        if module not in _MODULES or name not in _CLASSES:
            raise PlanError(
                f"the file names {module}.{name}, which has no place in a solution of MASE; it was "
                f"not run"
            )
        from torch.distributed.tensor import placement_types  # noqa: PLC0415  torch is slow

        found: type = getattr(placement_types, name)
        return found


def read_solution(path: Path, *, trust_pickle: bool) -> dict[str, MaseNode]:
    """Read a solution that MASE wrote on this machine.

    Args:
        path: of a local file.
        trust_pickle: that the user knows where the file comes from, and asks for it to be read.

    Raises:
        OptionError: it is not trusted.
        PlanError: it is no solution, or names what has no place in one.
    """
    if not trust_pickle:
        raise OptionError(
            f"{path} is a pickle, which can run whatever its author wants; if you made it "
            f"yourself, say so with --trust-pickle"
        )
    with path.open("rb") as file:
        try:
            document = _Placements(file).load()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None
        except Exception as error:  # noqa: BLE001  a broken pickle raises anything
            raise PlanError(f"{path} is no pickle of a solution: {error}") from None
    try:
        return {
            str(name): MaseNode(_side(node.get("args", {})), _side(node.get("results", {})))
            for name, node in document.items()
        }
    except (AttributeError, TypeError) as error:
        raise PlanError(f"{path} is no solution of MASE: {error}") from None


def _side(placed: dict[str, Iterable["Placement"]]) -> dict[str, Placements]:
    return {str(name): tuple(map(repr, placements)) for name, placements in placed.items()}


def write_solution(solution: MaseSolution, path: Path, axis_sizes: tuple[int, ...]) -> None:
    """Write a solution for MASE.

    Args:
        solution: placements by node.
        path: of the file.
        axis_sizes: of the mesh that it is for.
    """

    def placed(side: Any) -> dict[str, tuple["Placement", ...]]:
        return {
            name: to_placements(layout_of_texts(texts, axis_sizes), axis_sizes)
            for name, texts in side.items()
        }

    document = {
        name: {"args": placed(node.args), "results": placed(node.results)}
        for name, node in solution.items()
    }
    path.write_bytes(pickle.dumps(document))
