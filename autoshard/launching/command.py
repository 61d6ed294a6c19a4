"""The command `autoshard launch`: torchrun with a plan."""

import os
import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from autoshard.base.files import read_file
from autoshard.errors import OptionError, PlanError
from autoshard.launching import worker
from autoshard.launching.context import PLAN_VARIABLE, TIMING_VARIABLE, check_world
from autoshard.launching.functions import first_failure
from autoshard.mesh import mesh_text
from autoshard.plan import Plan

_PER_NODE_VARIABLE = "PET_NPROC_PER_NODE"
"""The default of torchrun's option."""

_SIGNALLED = 128
"""A program that a signal ends has this exit status plus the signal's number, as shells say it."""


def run_command(arguments: Sequence[str], *, find: Callable[[str], Path] = Path) -> None:
    """Launch a program on the devices of a plan; returns when all ranks are done.

    Args:
        arguments: the command line: options of this command and of torchrun, the program and its
            arguments.
        find: maps the value of `--plan` to the file of the plan.

    Raises:
        OptionError: options contradict each other.
        PlanError: the file has no plan, or a plan for another number of devices.
        LaunchError: a rank failed.
        SystemExit: the arguments are invalid, or `--help` is among them.
    """
    options = _parser().parse_args(list(arguments))
    path = find(options.plan).resolve()
    document = read_file(path, PlanError)
    try:
        plan = Plan.from_json(document)
    except PlanError as error:
        raise PlanError(f"{options.plan}: {error}") from None
    _set_world(options, plan)
    if options.no_python or options.run_path:
        raise OptionError("--no-python and --run-path: the program must be a Python program")
    variables = {PLAN_VARIABLE: str(path)}
    if options.timing:
        variables[TIMING_VARIABLE] = "1"
    _run(options, variables)


def run_module(module: str, arguments: Sequence[str], *, num_ranks: int) -> None:
    """Run a Python module on several ranks of this machine; returns when all are done.

    Raises:
        LaunchError: a rank failed.
    """
    start = ["--nproc-per-node", str(num_ranks), "-m", module, *arguments]
    _run(torchrun.get_args_parser().parse_args(start), {})


def _run(options: Namespace, variables: Mapping[str, str]) -> None:
    """Run torchrun with ranks that record how they failed."""
    module = ["-m"] if options.module else []
    options.training_script_args = [*module, options.training_script, *options.training_script_args]
    options.training_script, options.module = worker.__name__, True
    with TemporaryDirectory(prefix="autoshard-launch-") as folder:
        try:
            with _environment({**variables, worker.FAILURES_VARIABLE: folder}):
                torchrun.run(options)  # type: ignore[no-untyped-call]  # torch's own
        except ChildFailedError as failed:
            raise first_failure(Path(folder), failed) from None
        except SignalException as stopped:
            # The ranks have ended; torchrun turns Ctrl-C and SIGTERM into this exception.
            if stopped.sigval is not signal.SIGINT:
                raise SystemExit(_SIGNALLED + stopped.sigval) from None
            raise KeyboardInterrupt from None


def _parser() -> ArgumentParser:
    parser: ArgumentParser = torchrun.get_args_parser()
    parser.prog = "autoshard launch"
    parser.description = (
        "Launch a Python program on the devices of a plan. Takes the options of torchrun; by "
        "default all ranks run on this machine. In the program, autoshard.get_context() returns "
        "the plan and the device mesh."
    )
    parser.add_argument(
        "--plan",
        required=True,
        help="A plan written by `autoshard plan -o`, or its id or address at a planning service.",
    )
    parser.add_argument(
        "--nproc", dest="nproc_per_node", help="Processes on this machine, as --nproc-per-node."
    )
    parser.add_argument(
        "--timing",
        action="store_true",
        help="Print the duration of each step and the predicted one.",
    )
    if _PER_NODE_VARIABLE not in os.environ:
        parser.set_defaults(nproc_per_node=None)
    return parser


def _set_world(options: Namespace, plan: Plan) -> None:
    """Set the default number of processes per node, and check the total."""
    least, num_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    if least != num_nodes:
        raise OptionError(
            f"--nnodes {options.nnodes}: a plan is for a fixed number of devices; pass one number"
        )
    if options.nproc_per_node is None:
        num_devices = plan.mesh.num_devices
        if num_devices % num_nodes:
            raise PlanError(
                f"the plan is for {num_devices} devices ({mesh_text(plan.mesh)}), which do not "
                f"divide evenly over {num_nodes} nodes; pass --nproc-per-node on each"
            )
        options.nproc_per_node = str(num_devices // num_nodes)
    per_node = torchrun.determine_local_world_size(options.nproc_per_node)
    check_world(plan, per_node * num_nodes)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which environment variables are set, for the ranks to inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
