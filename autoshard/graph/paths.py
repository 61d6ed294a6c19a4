"""Dotted paths of modules, such as those of the operators of a program."""

from collections.abc import Iterator


def module_paths(module: str) -> Iterator[str]:
    """The paths of a module and of its parent modules, outermost first.

    Example:
        >>> list(module_paths("layers.3.mlp"))
        ['layers', 'layers.3', 'layers.3.mlp']
    """
    parts = module.split(".") if module else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def layer_path(module: str) -> str:
    """The path of the layer that a module belongs to: up to the first number; empty if none is.

    Example:
        >>> layer_path("model.layers.3.mlp.up")
        'model.layers.3'
    """
    paths = (path for path in module_paths(module) if path.rpartition(".")[2].isdecimal())
    return next(paths, "")
