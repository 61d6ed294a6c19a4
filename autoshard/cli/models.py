"""The model of a command: the file of a graph, or what is exported here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autoshard.cli.rendering.numbers import count
from autoshard.errors import OptionError
from autoshard.plan import Mode
from autoshard.requests.model_configs import BatchShape, ElementType, check_named_config

ModelSource = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A .pt2 archive, or its model.json; the config.json of a model of transformers, its "
        "folder, or its name in the Hugging Face cache of this machine; or FILE.py:FUNCTION, which "
        "returns a module and a batch. The file is run.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigBatch:
    """Options about the batch of a model that is given as a config."""

    panel: ClassVar[str] = "Batch of a config"
    batch_size: Annotated[
        int | None, count(help="Samples of a step, of all devices together; 8 by default.")
    ] = None
    seq_length: Annotated[
        int | None,
        count(help="Tokens of each sample; by default 4096, or as many as the model has."),
    ] = None
    dtype: Annotated[
        ElementType | None,
        typer.Option(help="Element type of the weights; the config's by default, or bfloat16."),
    ] = None

    def graph(self, source: str, mode: Mode) -> Path | bytes:
        """The file of a graph, or the graph of a model that is exported here.

        Args:
            source: a `ModelSource`.
            mode: for a config, whether its graph is of training.

        Raises:
            OptionError: there is no such model, or an option is not for it.
            GraphError: it cannot be exported.
        """
        sizes = {"batch_size": self.batch_size, "seq_length": self.seq_length}
        given = {name: value for name, value in sizes.items() if value is not None}
        if is_graph_file(source):
            if given or self.dtype:
                raise OptionError(
                    f"{source} has the batch that it was exported with: --batch-size, "
                    "--seq-length and --dtype are for a config.json"
                )
            return Path(source)
        batch = BatchShape(**given)
        check_named_config(source, batch)
        # torch is imported only for a model that is exported here.
        from autoshard.requests.model_files import export_named  # noqa: PLC0415

        return export_named(source, batch if given else None, mode=mode, dtype=self.dtype)


def is_graph_file(source: str) -> bool:
    """True for the file of an exported graph, not a model that is to be exported.

    >>> is_graph_file("model.pt2"), is_graph_file("llama/config.json"), is_graph_file("a.py:make")
    (True, False, False)
    """
    path = Path(source)
    if path.suffix == ".json":
        return path.name != "config.json" and not _is_config(path)
    if path.is_dir():
        return not (path / "config.json").is_file()
    return path.suffix == ".pt2" or path.is_file()


def _is_config(path: Path) -> bool:
    """True for a JSON file with the type of a model of transformers."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "model_type" in document
