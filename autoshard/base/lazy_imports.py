"""Packages whose public names are imported on first use (PEP 562).

Such a package is cheap to import: `from autoshard import Client` loads neither torch nor the
solver. Its `__init__.py` imports its names for type checkers, and at run time this module imports
each of them when it is read first:

    if TYPE_CHECKING:
        from autoshard.plan.document import Plan
    else:
        __getattr__, __dir__ = lazy_names(__name__)

No name may be that of a submodule: importing the submodule sets an attribute of the same name.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package that imports its names on first use.

    Args:
        package: its `__name__`. Its names are those that the block `if TYPE_CHECKING:` of its
            source imports.
    """
    module = sys.modules[package]
    sources = _type_checking_imports(package)

    def __getattr__(name: str) -> Any:  # noqa: N807  it becomes that of the package
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(sources[name]), name)
        setattr(module, name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807  it becomes that of the package
        return sorted({*vars(module), *sources})

    return __getattr__, __dir__


def _type_checking_imports(package: str) -> dict[str, str]:
    """The module of each name that a package imports for type checkers only."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    loader = cast("Any", spec.loader)
    blocks = (
        statement.body
        for statement in ast.parse(loader.get_source(package)).body
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    )
    return {
        alias.name: statement.module
        for body in blocks
        for statement in body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }
