"""The model of a command: the file of a graph, or what is exported here."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from autoshard.cli.rendering.numbers import count
from autoshard.model_plans import model_graph
from autoshard.plan import PlanOptions
from autoshard.requests.model_configs import ElementType

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
        int | None,
        count(
            "--batch-size",
            "--global-batch",
            help="Samples of a step, of all devices together; 8 by default.",
        ),
    ] = None
    seq_length: Annotated[
        int | None,
        count(help="Tokens of each sample; by default 4096, or as many as the model has."),
    ] = None
    dtype: Annotated[
        ElementType | None,
        typer.Option(help="Element type of the weights; the config's by default, or bfloat16."),
    ] = None

    def graph(self, source: str, options: PlanOptions) -> Path | bytes:
        """The file of a graph, or the graph of a model that is exported here.

        Args:
            source: a `ModelSource`.
            options: of planning: of a config, their mode, and the number of micro-batches.

        Raises:
            OptionError: there is no such model, or an option is not for it.
            GraphError: it cannot be exported.
        """
        found = model_graph(source, options=options, **asdict(self))
        assert isinstance(found, Path | bytes), "a source is a text"
        return found
