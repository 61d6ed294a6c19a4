"""The page's JavaScript modules as one script, so that a file on a disk can run them.

A browser loads no modules for a page that is opened from a disk. Each module becomes a function
that returns what the module exports, and imports become constants. The modules keep to the forms
of `import` and `export` that are rewritten here; any other fails.
"""

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

ENTRY = "app.js"
_PACKAGES = {
    "preact": "vendored/preact.mjs",
    "preact/hooks": "vendored/hooks.mjs",
    "htm": "vendored/htm.mjs",
}
_IMPORT = re.compile(
    r'^import *(?:\{(?P<names>[^}]*)\}|(?P<default>\w+)) *from *"(?P<source>[^"]+)";', re.MULTILINE
)
_EXPORTED = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LIST = re.compile(r"export ?\{([^}]*)\};?")
_DEFAULT = re.compile(r"export default ")
_LEFT = re.compile(r"^(?:import|export)\b", re.MULTILINE)


def page_files() -> Traversable:
    """The folder of the page's modules and of its style sheet."""
    return files(__package__) / "files"


@cache
def bundled_script() -> str:
    """All modules of the page as one script."""
    functions: dict[str, str] = {}
    _add(ENTRY, functions)
    modules = "\n".join(f"modules[{name!r}] = {code}" for name, code in functions.items())
    return f"const modules = {{}};\n{modules}\n"


def _add(name: str, functions: dict[str, str]) -> None:
    """Add a module after those that it imports."""
    if name in functions:
        return
    functions[name] = ""
    code = (page_files() / name).read_text(encoding="utf-8")
    sources = [_file(match["source"]) for match in _IMPORT.finditer(code)]
    for source in sources:
        _add(source, functions)
    # Dictionaries keep the order of insertion: a module comes after its sources.
    del functions[name]
    functions[name] = _function(name, code)


def _function(name: str, code: str) -> str:
    exports = {found: found for found in _EXPORTED.findall(code)}
    code = _EXPORTED.sub("", code)
    code = re.sub(r"^//# sourceMappingURL=.*$", "", code, flags=re.MULTILINE)
    for match in _LIST.finditer(code):
        for part in match[1].split(","):
            inner, _, outer = part.strip().partition(" as ")
            exports[outer or inner] = inner
    code = _LIST.sub("", code)
    if _DEFAULT.search(code):
        exports["default"] = "exportedDefault"
        code = _DEFAULT.sub("const exportedDefault = ", code)
    code = _IMPORT.sub(_constants, code)
    if found := _LEFT.search(code):
        line = code[found.start() :].partition("\n")[0]
        raise ValueError(f"{name}: an import or export in a form that is not rewritten: {line}")
    returned = ", ".join(f"{outer}: {inner}" for outer, inner in exports.items())
    return f"(() => {{\n{code.strip()}\nreturn {{ {returned} }};\n}})();"


def _constants(match: re.Match[str]) -> str:
    """The constants that an import becomes."""
    source = f"modules[{_file(match['source'])!r}]"
    if match["default"]:
        return f"const {match['default']} = {source}.default;"
    names = re.sub(r"(\w+) as (\w+)", r"\1: \2", " ".join(match["names"].split()))
    return f"const {{ {names} }} = {source};"


def _file(source: str) -> str:
    return _PACKAGES.get(source) or source.removeprefix("./")
