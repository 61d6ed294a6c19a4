"""Running the small sizes on gloo ranks; results are kept, so a run can go on.

One launch of ranks runs a batch of families one after the other, since launching takes longer
than most of them; each has its result as soon as its batch has ended.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.planning import code_digest
from benchmarks.zoo.families import FAMILIES

_ROOT = Path(__file__).parents[2]
_LAUNCHER = Path("tests/support/ranks.py")

PRECISIONS = ("float64", "float32")


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How the families are run.

    Attributes:
        folder: holds results.
        num_ranks: the numbers of ranks that are asked for.
        precisions: element types likewise.
        batch: families per launch.
        patience: seconds after which a launch is given up.
    """

    folder: Path
    num_ranks: Sequence[int] = (8, 4)
    precisions: Sequence[str] = PRECISIONS
    batch: int = 8
    patience: float = 900.0


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One family in one precision on a number of ranks.

    Attributes:
        family: its name.
        precision: element type.
        num_ranks: how many ranks ran it.
        error: what went wrong on the first rank where something did; empty where all is well.
        code: digest of the code that was run.
    """

    family: str
    precision: str
    num_ranks: int
    error: str
    code: str

    @property
    def column(self) -> str:
        """Such as `float64 on 4`."""
        return f"{self.precision} on {self.num_ranks}"

    def __str__(self) -> str:
        return f"{self.family} {self.column}: {self.error or 'equal'}"


def rank_outcomes(settings: RankSettings) -> list[RankOutcome]:
    """All that is known, in the order of the families."""
    cases = product(FAMILIES, settings.num_ranks, settings.precisions)
    kept = (_kept(*case, settings) for case in cases)
    return [_read(path) for path in kept if path.exists()]


def run_on_ranks(
    families: Sequence[str], settings: RankSettings
) -> Iterator[Sequence[RankOutcome]]:
    """Run what has not passed yet; what came out, launch by launch."""
    for num_ranks, precision in product(settings.num_ranks, settings.precisions):
        missing = [name for name in families if not _passed(name, num_ranks, precision, settings)]
        for start in range(0, len(missing), settings.batch):
            batch, code = missing[start : start + settings.batch], code_digest()
            errors = _launch(batch, num_ranks, precision, settings)
            outcomes = [RankOutcome(n, precision, num_ranks, errors[n], code) for n in batch]
            for outcome in outcomes:
                path = _kept(outcome.family, num_ranks, precision, settings)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")
            yield outcomes


def _launch(
    families: Sequence[str], num_ranks: int, precision: str, settings: RankSettings
) -> Mapping[str, str]:
    """Run families on ranks that are started for them: the error of each."""
    folder = (settings.folder / "launch").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = f"tests/zoo/test_zoo_on_{num_ranks}_ranks.py"
    cases = {name: f"{name} {precision} on {num_ranks}" for name in families}
    command = [sys.executable, str(_LAUNCHER), file, str(folder), f"--ranks={num_ranks}"]
    command += [f"--case={case}" for case in cases.values()]
    with (folder / "log").open("w", encoding="utf-8") as said:
        try:
            subprocess.run(  # noqa: S603  our own program
                command, cwd=_ROOT, stderr=said, timeout=settings.patience, check=True
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(families, f"launch stopped after {settings.patience:g} s")
        except subprocess.CalledProcessError as error:
            return dict.fromkeys(families, f"launch ended with status {error.returncode}")
    outcomes: list[dict[str, str]] = json.loads((folder / "outcomes.json").read_text("utf-8"))
    return {name: first_error(outcomes, case) for name, case in cases.items()}


def first_error(outcomes: Sequence[Mapping[str, str]], case: str) -> str:
    """The last line of what went wrong with a case, on the first rank where something did.

    Args:
        outcomes: what each rank says of each case, as `tests/support/ranks.py` writes it.
        case: one of them.
    """
    failed = (found[case].strip() for found in outcomes if found[case])
    return next(failed, "").rpartition("\n")[2]


def _passed(name: str, num_ranks: int, precision: str, settings: RankSettings) -> bool:
    path = _kept(name, num_ranks, precision, settings)
    return path.exists() and not _read(path).error


def _kept(name: str, num_ranks: int, precision: str, settings: RankSettings) -> Path:
    return settings.folder / "ranks" / f"{name}-{precision}-{num_ranks}.json"


def _read(path: Path) -> RankOutcome:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return RankOutcome(**fields)
