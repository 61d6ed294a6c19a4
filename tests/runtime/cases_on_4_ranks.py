"""The cases of all files on 4 ranks, for one launch: starting ranks on a GPU takes long.

The order is that of their value where time is short: what a plan computes comes first.
"""

from collections.abc import Callable
from importlib import import_module

NUM_RANKS = 4
FILES = (
    "test_programs_on_ranks",
    "test_models_on_ranks",
    "test_memory_on_ranks",
    "test_training_on_ranks",
    "test_training_loops_on_ranks",
    "test_functions_on_ranks",
    "test_habits_on_ranks",
    "test_weights_on_ranks",
    "test_kernels_on_ranks",
    "test_pipelines_on_ranks",
    "test_measurements_on_ranks",
)

CASES: dict[str, Callable[[], None]] = {}
LONG: set[str] = set()
for file in FILES:
    module = import_module(f"runtime.{file}")
    assert module.NUM_RANKS == NUM_RANKS
    CASES |= {f"{file}: {name}": case for name, case in module.CASES.items()}
    LONG |= {f"{file}: {name}" for name in getattr(module, "LONG", ())}
