"""Runs a program as one rank: `python -m autoshard.launching.worker [-m] PROGRAM ARGS`."""

import faulthandler
import os
import runpy
import sys
from pathlib import Path

from autoshard.launching.context import get_context
from autoshard.launching.functions import failures_recorded

FAILURES_VARIABLE = "AUTOSHARD_FAILURES"
"""Environment variable with the folder in which ranks record their failures."""


def main() -> None:
    """Run the program like `python PROGRAM ARGS`, and record a failure."""
    faulthandler.enable()
    arguments = sys.argv[1:]
    is_module = arguments[0] == "-m"
    program, *rest = arguments[is_module:]
    sys.argv = [program, *rest]
    with failures_recorded(Path(os.environ[FAILURES_VARIABLE])):
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
        if get_context.cache_info().currsize:
            get_context().close()


if __name__ == "__main__":
    main()
