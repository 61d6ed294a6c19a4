"""Every option of Python and of the command line refuses what it does not mean."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import autoshard as run
from support.models import meta, mlp
from support.wrong_values import wrong_values

import autoshard
from autoshard import ForbiddenCollective, PlanOptions, make_mesh, make_plan
from autoshard.base.arguments import checked_arguments
from autoshard.cli.main import COMMANDS
from autoshard.client import Retry
from autoshard.errors import InputError, OptionError
from autoshard.graph import export_model
from autoshard.plan.options import (
    OptionGroup,
    SolverOptions,
    option_groups,
    runtime_profiles,
    to_options,
)

NEEDED = {
    "shape": (2, 2),
    "num_devices": 4,
    "url": "http://127.0.0.1:9",
    "target": "fsdp2",
    "gpus": 4,
    "layout": "fsdp2",
    "name": "batch_size",
    **dict.fromkeys(("path", "folder", "plan_id", "job_id"), "x"),
}
"""Arguments without which the options of a function cannot be read."""


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, constructors and methods of clients that declare options."""
    for name in autoshard.__all__:
        member = getattr(autoshard, name)
        if inspect.isfunction(member):
            yield name, member
    client = autoshard.Client("http://127.0.0.1:9", cache=False)
    for name, member in inspect.getmembers(client, inspect.ismethod):
        if not name.startswith("_"):
            yield f"Client.{name}", member
    kinds = (autoshard.Client, autoshard.MixedPrecision, autoshard.OpaqueModule)
    for kind in (*kinds, Retry):
        yield kind.__name__, kind


OPTIONS = [
    pytest.param(function, name, annotation, id=f"{owner}-{name}")
    for owner, function in functions()
    for name, annotation in checked_arguments(function)
    if inspect.signature(function).parameters[name].default is not inspect.Parameter.empty
]


@pytest.mark.matrix
@pytest.mark.parametrize(("function", "name", "annotation"), OPTIONS)
def test_options_of_functions(function: Callable[..., Any], name: str, annotation: Any) -> None:
    values = wrong_values(annotation)
    assert len(values) >= 3
    for value in values:
        given = {
            known: NEEDED.get(known, ...)
            for known, parameter in inspect.signature(function).parameters.items()
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        }
        with pytest.raises(InputError, match=name):
            function(**given | {name: value})


def test_integers_of_numpy_and_torch_are_numbers_and_arrays_are_none() -> None:
    for size in (np.int64(3), torch.tensor(3)):
        assert make_mesh((4,), nodes=size // size).num_nodes == 1
    for array in (np.ones(2), torch.ones(2), np.float64(2.0), np.array([1, 2])):
        with pytest.raises(InputError, match="nodes"):
            make_mesh((4,), nodes=array)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ForbiddenCollective, name) for name in ForbiddenCollective.model_fields]
    + [(PlanOptions, "mode")]
    + [(kind, name) for kind in option_groups().values() for name in kind.model_fields],
)
def test_options_of_planning(kind: type[OptionGroup | ForbiddenCollective], name: str) -> None:
    """Each by itself in its group, and as a keyword of `PlanOptions`."""
    keyword = kind.keyword(name) if issubclass(kind, OptionGroup) else name
    values = BYTES if keyword in SIZES else wrong_values(kind.model_fields[name].annotation)
    given = {"kind": "all_gather"} if kind is ForbiddenCollective else {}
    kinds = (kind, PlanOptions) if issubclass(kind, OptionGroup) else (kind,)
    assert len(values) >= 3
    for value in values:
        for made in kinds:
            known = keyword if made is PlanOptions else name
            if known in option_groups() and isinstance(value, dict):
                continue  # a group
            with pytest.raises(OptionError, match=known):
                made(**given | {known: value})


def test_options_are_keywords_and_groups() -> None:
    options = PlanOptions(
        memory_budget="70GB", solver="ilp", memory={"activation_checkpointing": "never"}
    )
    assert options == PlanOptions(
        memory={"budget": 70_000_000_000, "activation_checkpointing": "never"},
        solver=SolverOptions(name="ilp"),
    )
    assert options.given == {
        "memory_budget": 70_000_000_000,
        "activation_checkpointing": "never",
        "solver": "ilp",
    }
    assert PlanOptions(**options.given) == options
    assert PlanOptions.model_validate_json(options.model_dump_json()) == options
    keywords = [keyword for kind in option_groups().values() for keyword in kind.keywords()]
    assert len(set(keywords)) == len(keywords)
    with pytest.raises(OptionError, match="memory_budget is given twice"):
        PlanOptions(memory_budget=1, memory={"budget": 2})
    with pytest.raises(OptionError, match="memory is a group of options: give one of mem"):
        PlanOptions(memory="70GB")
    with pytest.raises(OptionError, match="did you mean 'memory_budget'"):
        PlanOptions(memory={"budgett": 1})


def test_documents_without_groups_are_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match=r"memory_budget is memory\.budget"):
        found = PlanOptions.model_validate({"memory_budget": 1 << 30, "mode": "inference"})
    assert found == PlanOptions(memory_budget=1 << 30, mode="inference")
    with pytest.warns(DeprecationWarning, match=r"options\.training\.micro_batches"):
        assert found.micro_batches == 1


def test_a_profile_of_a_runtime_sets_what_is_not_given() -> None:
    for name in runtime_profiles():
        found = PlanOptions(runtime=name).runtime
        assert PlanOptions(**PlanOptions(runtime=name).given).runtime == found
        assert bool(found.foreign_fields) == (name != "other")
    changed = PlanOptions(runtime="megatron-core", bucket_bytes="1GB").runtime
    assert (changed.bucket_bytes, changed.weighted_activations) == (10**9, True)
    assert to_options(
        PlanOptions(runtime="megatron-core", overlap=True), {"runtime": "autoshard"}
    ) == (PlanOptions(overlap=True, runtime="autoshard"))
    with pytest.raises(OptionError, match="there is no runtime 'megatron'; did you mean"):
        PlanOptions(runtime="megatron")
    with pytest.raises(OptionError, match="activation_overlap: the runtime of autoshard does not"):
        PlanOptions(activation_overlap=0.5)


BYTES = ("4XB", "", -1, 2.5, 10**30, True)
SIZES = {"memory_budget", "bucket_bytes"}
"""Numbers of bytes, which may be texts."""

TEXTS = {
    "IntRange": ("four", "4GB", "", "2.5", "9" * 30, "-1"),
    "FloatRange": ("fast", "5x", "", "nan", "1e300", "-1"),
    "FloatParamType": ("fast", "5x", "", "nan", "1e300", "-1"),
    "TyperChoice": ("INVALID", "", "5", "auto,auto", "x" * 1000),
}
"""Wrong texts by type of an option of the command line."""
MEANINGS = {
    "--mesh": ("", "0x4", "axb", "2x-4", "9" * 30),
    "--nodes": ("3", "9" * 30),
    "--topology": ("", "h1000", "5", "x" * 1000, "nowhere.json"),
    "--intra-bandwidth": ("10", "fast", "", "-5GB/s", "450"),
    "--inter-bandwidth": ("10", "fast", "", "-5GB/s", "450"),
    "--axes": ("dp", "", "dp,dp", "a,b,c"),
    "--memory": ("80", "80XB", "", "-1", "9" * 40),
    "--runtime": ("", "x", "5", "megatron", "nowhere.json"),
    "--stages": ("four", "0", "", "2.5", "9" * 30),
    "--stages-per-rank": ("four", "0", "", "2.5", "9" * 30),
    "--balance": ("layers", "", "0,1", "99", "1,x"),
    "--cut": ("x", "", "before:", "before:nothing", "over:layers"),
    "--checkpointed-module": ("", "nothing", "*.nothing", "x" * 1000),
    "--solver": ("", "5", "no such", "NOSUCHSOLVER", "x" * 1000),
    "--pin": ("x", "", "parameter:w", "weight:w=S(0)", "parameter:*=S(x)"),
    "--forbid": ("x", "", "all_gather:x", "all_gather@nowhere", "5"),
    "--batch-axis": ("", "nowhere", "5", "x" * 1000),
    "--skip-fully-replicated-on": ("tp", "nowhere", "5", "dp", "-1"),
    "--like": ("", "x", "megatron tp=3", "hsdp shard=9", "5"),
    "--server": ("planner", "//", "5", "ftp://planner", "localhost:8000"),
    "--import": ("", "no_such_module", "5", "..", "x" * 1000),
    "--to": ("", "INVALID", "5", "fsdp", "x" * 1000),
    "--max-bytes": ("1XB", "", "-1", "fast", "9" * 40),
    "--scope": ("", "INVALID", "5", "plan,read", "x" * 1000),
    "--project": ("", "UPPER", "a b", "x" * 1000, "-"),
}
"""Wrong texts of options that the command itself reads."""


def command_options() -> Iterator[Any]:
    """Each option of the command line that has a value, with wrong values."""
    meanings = dict(MEANINGS)
    for root, deferred in COMMANDS.items():
        for path, option in parameters(deferred.load(root), (root,)):
            flag = option.opts[0]
            if option.param_type_name == "argument" or option.is_flag:
                continue
            # Commands share the options that they read themselves.
            wrong = meanings.pop(flag, None) or TEXTS.get(type(option.type).__name__)
            if wrong is not None:
                yield pytest.param(path, flag, wrong, id="-".join((*path, flag)))


def parameters(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The parameters of a command and of its subcommands."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, (*path, name))
    if not hasattr(command, "commands"):
        yield from ((path, parameter) for parameter in command.params)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported network of two layers."""
    model, kwargs = meta(mlp)
    path = tmp_path_factory.mktemp("options") / "mlp.pt2"
    path.write_bytes(export_model(model, (), kwargs))
    make_plan(path, 2).save(path.with_name("plan.json"))
    return path


@pytest.mark.matrix
@pytest.mark.parametrize(("path", "flag", "wrong"), [*command_options()])
def test_options_of_commands(
    path: tuple[str, ...], flag: str, wrong: tuple[str, ...], archive: Path
) -> None:
    made = archive.with_name("plan.json")
    needed = {
        "plan": [archive, "--mesh", "2x2"],
        "fit": [archive, "--gpus", 2],
        "size": [archive, "--tokens-per-second", 1, "--max-gpus", 2],
        "search": [archive, "--devices", 4],
        "coverage": [archive],
        "show": [made],
        "check": [archive, made],
        "explain": [made, "linear"],
        "compare": [made, made],
        "export": [made, "--to", "fsdp2"],
        "simulate": [made],
        "profile": [made],
        "mase": [made],
        "keys": ["someone", "--store", f"sqlite:///{archive.with_name('keys.sqlite3')}"],
    }.get(path[0], [])
    for text in wrong:
        result = run(*path, *needed, flag, text)
        assert result.exit_code != 0, text
        named = {flag, flag.removeprefix("--").replace("-", "_"), repr(text)}
        named |= {quote + part for part in re.split("[ ,=x]", text) if part for quote in " '"}
        assert any(name in result.output for name in named), (text, result.output)
