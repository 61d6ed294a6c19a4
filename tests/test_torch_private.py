"""Private parts of torch stand in one package; a torch that lacks one is refused."""

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.errors import TorchVersionError
from autoshard.torch_private import check_parts, checks, checks_of_tensors, pytree, saves_result
from autoshard.torch_private.versions import NEWEST, OLDEST, expected_of_torch

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autoshard" / "torch_private"
SOURCES = [
    path
    for folder in ("autoshard", "server", "solver_cache")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PUBLIC = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
"""Of named tuples, of `os`, and of `sys`."""

OPERATORS = re.compile(r"\b(_?aten|_ATEN)\b", re.IGNORECASE)
"""Operators of ATen may have names that begin with an underscore; they are not private."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.AST]) -> set[str]:
    """Private names that the library itself defines or assigns."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


@cache
def torch_names() -> frozenset[str]:
    """Private names of objects of torch that the package reads or writes."""
    nodes = (n for path in PACKAGE.glob("*.py") for n in ast.walk(ast.parse(path.read_text())))
    return frozenset(n.attr for n in nodes if isinstance(n, ast.Attribute) and is_private(n.attr))


def foreign_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of other libraries that are read, written or imported."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name in own:
                pass
            case ast.Attribute(attr=name, value=value) if is_private(name):
                known = name in PUBLIC or name in own - torch_names()
                if not known and not OPERATORS.search(ast.unparse(value)):
                    yield ast.unparse(node)
            case ast.ImportFrom(module=str(module), names=names):
                parts = [*module.split("."), *(alias.name for alias in names)]
                if not module.startswith("autoshard") and any(map(is_private, parts)):
                    yield ast.unparse(node)


@pytest.mark.thorough
def test_private_parts_of_torch_are_named_in_one_package() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    own = own_names(list(trees.values()))
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        if PACKAGE not in path.parents
        for name in foreign_names(tree, own)
    }
    assert found == set()


def test_the_present_torch_is_accepted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_parts(checks_of_tensors())


def wrong_transforms() -> bool:
    return False


def no_context() -> Any:
    return warnings.catch_warnings()


BROKEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "in-place operators increase a tensor's version": ("version_counter", lambda _: 0),
    "a backward pass has a number": ("runs_backward", lambda: False),
    "backward tells leaves that accumulate from those of autograd.grad": (
        "accumulates",
        lambda _: True,
    ),
    "hooks of a gradient are seen": ("has_gradient_hooks", lambda _: False),
    "modes see reads of autograd's attributes": ("reads_autograd", lambda _: False),
    "transforms of torch.func are seen": ("is_transformed", wrong_transforms),
    "functions of subclasses can be left out": ("without_torch_function", no_context),
    "views share the storage of their tensor": ("shares_memory", lambda *_: False),
    "operators have a schema": ("schema_of", lambda operator: operator),
    "modules keep their parameters by name": (
        "own_parameters",
        lambda module: dict(module.named_parameters()),
    ),
    "samplers keep the number that they were given": (
        "given_num_samples",
        lambda sampler: sampler.num_samples,
    ),
    "what a checkpoint recomputes can be changed": ("checkpointed", lambda _: nullcontext()),
    "nodes of autograd tell whether they save their result": ("saves_result", lambda _: False),
    "clip_grad_norm_ computes the norm by a function that can be replaced": (
        "replace_total_norm",
        lambda _: None,
    ),
}
"""Checks, each with a part that another torch would have, but that does something else."""


@pytest.mark.parametrize("what", BROKEN)
def test_a_part_that_does_something_else_is_an_error_that_names_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, *BROKEN[what])
    expected = rf"PyTorch {re.escape(torch.__version__)} .*\({re.escape(what)}.*2\.\d+ to 2\.\d+"
    with pytest.raises(TorchVersionError, match=expected):
        check_parts(checks_of_tensors())


def test_a_state_dict_that_is_filled_by_another_function_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions: Any = checks._state_dict_utils
    monkeypatch.setattr(functions, "_broadcast_tensors", lambda *_: None)
    with pytest.raises(TorchVersionError, match="state dicts are filled"):
        check_parts(checks_of_tensors())


def test_state_dicts_that_are_made_by_another_function_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions: Any = checks.state_dict
    monkeypatch.setattr(functions, "get_state_dict", lambda *_: None)
    with pytest.raises(TorchVersionError, match="state dicts are made"):
        check_parts(checks_of_tensors())


def test_checkpoints_that_do_not_ask_dtensors_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: Any = checks.planner_helpers
    monkeypatch.setattr(functions, "_create_chunk_list", lambda _: None)
    with pytest.raises(TorchVersionError, match="distributed checkpoints ask a DTensor"):
        check_parts(checks_of_tensors())


def test_each_check_can_fail() -> None:
    others = {
        "state dicts are filled by a function that can be replaced",
        "state dicts are made by functions that can be replaced",
        "distributed checkpoints ask a DTensor for its slices",
    }
    assert {*BROKEN, *others} == {*checks_of_tensors()}


def raised() -> bool:
    raise AttributeError("no such part")


def test_all_that_fails_is_named_with_what_was_raised() -> None:
    parts = {"one": lambda: True, "two": lambda: False, "three": raised}
    with pytest.raises(TorchVersionError, match=r"\(two; three \(AttributeError: no such part\)\)"):
        check_parts(parts)


def test_the_override_turns_the_error_into_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_ANY_TORCH", "1")
    with pytest.warns(UserWarning, match=r"\(two\); AUTOSHARD_ANY_TORCH=1"):
        check_parts({"two": lambda: False})
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.warns(UserWarning, match=r"2\.9\.1 is too old.*AUTOSHARD_ANY_TORCH=1"):
        check_parts({})


def test_other_values_of_the_override_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_ANY_TORCH", "0")
    with pytest.raises(TorchVersionError, match="set AUTOSHARD_ANY_TORCH=1"):
        check_parts({"two": lambda: False})


def version(number: tuple[int, int], *, by: int = 0) -> str:
    return f"{number[0]}.{number[1] + by}.0+cpu"


def test_versions_that_were_tried_are_accepted_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (OLDEST, NEWEST):
        monkeypatch.setattr(torch, "__version__", version(number))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_parts({})


def test_a_newer_version_is_said_to_be_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version(NEWEST, by=1))
    with pytest.warns(UserWarning, match=r"newer than all .*what it relies on was checked"):
        check_parts({})


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version(OLDEST, by=-1))
    with pytest.raises(TorchVersionError, match="too old for autoshard: install one of"):
        check_parts({})


def test_a_class_that_is_not_there_is_an_error_that_names_versions() -> None:
    with (
        pytest.raises(TorchVersionError, match=r"base classes \(cannot import name .*2\.\d+ to 2"),
        expected_of_torch("base classes"),
    ):
        from torch.nn.modules.batchnorm import _NoSuchNorm  # noqa: F401, PLC0415


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norms_have_the_base_class(kind: type[nn.Module]) -> None:
    from autoshard.torch_private import BatchNormBase  # noqa: PLC0415

    assert issubclass(kind, BatchNormBase)


def test_what_is_required_is_what_was_tried() -> None:
    """pip refuses what the check would refuse; documents name the same versions."""
    project = (ROOT / "pyproject.toml").read_text()
    oldest, newest = (".".join(map(str, number)) for number in (OLDEST, NEWEST))
    assert f'"torch>={oldest}"' in project
    page = (ROOT / "docs" / "training.md").read_text()
    section = page.partition("## Versions of PyTorch")[2].partition("\n## ")[0]
    assert all(number in section for number in (oldest, newest, "AUTOSHARD_ANY_TORCH=1"))


def test_functions_that_need_their_result_in_backward_are_known() -> None:
    """A write into such a result makes backward fail on one device."""
    found = {
        name: (saves_result(results[0].grad_fn), _is_saved(results[0]))
        for name, function in _functions_of_a_matrix()
        if (results := _results(function))
    }
    assert len(found) > 150
    assert [name for name, (told, saved) in found.items() if saved and not told] == []
    needless = [name for name, (told, saved) in found.items() if told and not saved]
    assert len(needless) < 10, needless
    assert not any(name.endswith((".add", ".matmul", ".gelu", ".clone")) for name in needless)


NOT_OF_A_MATRIX = {"save", "load", "compile", "lobpcg"}


def _functions_of_a_matrix() -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    for module in (torch, torch.special, torch.linalg, functional):
        for name in dir(module):
            function = getattr(module, name)
            is_private = name.startswith("_") or name.endswith("_") or isinstance(function, type)
            if callable(function) and not is_private and name not in NOT_OF_A_MATRIX:
                yield f"{module.__name__}.{name}", function


def _results(function: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    matrix = torch.rand(4, 4, requires_grad=True) + torch.eye(4)
    for arguments in ((matrix,), (matrix, 1), (matrix, matrix + 1)):
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            leaves = pytree.tree_leaves(function(*arguments))
            found = [x for x in leaves if isinstance(x, torch.Tensor) and x.grad_fn is not None]
            return [x for x in found if x is not matrix]
    return []


def _is_saved(result: torch.Tensor) -> bool:
    try:
        result.detach().fill_(0.5)
        result.sum().abs().backward()
    except RuntimeError as error:
        return "needed for gradient computation has been modified" in str(error)
    return False
