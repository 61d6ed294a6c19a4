"""Running the small sizes on gloo ranks; results are stored, so a run can be resumed.

One launch of ranks runs a batch of families in sequence, because launching takes longer than most
families.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.planning import code_digest
from benchmarks.rank_cases import RankCases
from benchmarks.zoo.families import FAMILIES

_ROOT = Path(__file__).parents[2]

PRECISIONS = ("float64", "float32")


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of the runs.

    Attributes:
        folder: of results.
        num_ranks: numbers of ranks.
        precisions: element types.
        batch: families per launch.
        timeout: seconds after which a launch is stopped.
    """

    folder: Path
    num_ranks: Sequence[int] = (8, 4)
    precisions: Sequence[str] = PRECISIONS
    batch: int = 8
    timeout: float = 900.0


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One family in one precision on a number of ranks.

    Attributes:
        family: its name.
        precision: element type.
        num_ranks: number of ranks.
        error: of the first rank that failed; empty if none did.
        code: digest of the code that was run.
    """

    family: str
    precision: str
    num_ranks: int
    error: str
    code: str

    @property
    def column(self) -> str:
        """Column of the table, such as `float64 on 4`."""
        return f"{self.precision} on {self.num_ranks}"

    def __str__(self) -> str:
        return f"{self.family} {self.column}: {self.error or 'equal'}"


def rank_outcomes(settings: RankSettings) -> list[RankOutcome]:
    """All stored results, in the order of the families."""
    cases = product(FAMILIES, settings.num_ranks, settings.precisions)
    kept = (_kept(*case, settings) for case in cases)
    return [_read(path) for path in kept if path.exists()]


def run_on_ranks(
    families: Sequence[str], settings: RankSettings
) -> Iterator[Sequence[RankOutcome]]:
    """Run the cases that have not passed yet; yield the outcomes of each launch."""
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
    """Run families in one launch of ranks; return the last line of each one's error."""
    cases = {f"{name} {precision} on {num_ranks}": name for name in families}
    file = _ROOT / "tests" / "zoo" / f"test_zoo_on_{num_ranks}_ranks.py"
    errors = dict.fromkeys(families, f"launch stopped after {settings.timeout:g} s")
    try:
        with RankCases.started() as started:
            for case, error in started.run(file, num_ranks, list(cases), settings.timeout):
                errors[cases[case]] = error.strip().rpartition("\n")[2]
    except RuntimeError as failed:
        return dict.fromkeys(families, str(failed).partition("\n")[0])
    return errors


def _passed(name: str, num_ranks: int, precision: str, settings: RankSettings) -> bool:
    path = _kept(name, num_ranks, precision, settings)
    return path.exists() and not _read(path).error


def _kept(name: str, num_ranks: int, precision: str, settings: RankSettings) -> Path:
    return settings.folder / "ranks" / f"{name}-{precision}-{num_ranks}.json"


def _read(path: Path) -> RankOutcome:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return RankOutcome(**fields)
