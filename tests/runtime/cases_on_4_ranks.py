"""The cases of all files on 4 ranks, for one launch: starting ranks on a GPU takes long.

The order is that of their value where time is short: what a plan computes comes first.
"""

from collections.abc import Callable
from importlib import import_module

NUM_RANKS = 4
FILES = (
    "runtime.test_programs_on_ranks",
    "runtime.test_models_on_ranks",
    "runtime.test_memory_on_ranks",
    "runtime.test_training_on_ranks",
    "runtime.test_training_loops_on_ranks",
    "runtime.test_functions_on_ranks",
    "runtime.test_habits_on_ranks",
    "checkpoint.test_weights_on_ranks",
    "runtime.test_kernels_on_ranks",
    "runtime.test_pipelines_on_ranks",
    "measure.test_measurements_on_ranks",
)

CASES: dict[str, Callable[[], None]] = {}
LONG: set[str] = set()
for name_of_module in FILES:
    module, file = import_module(name_of_module), name_of_module.rpartition(".")[2]
    assert module.NUM_RANKS == NUM_RANKS
    CASES |= {f"{file}: {name}": case for name, case in module.CASES.items()}
    LONG |= {f"{file}: {name}" for name in getattr(module, "LONG", ())}
