"""Configs of transformers' models: what arithmetic says of them. Nothing here imports torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import OptionError

DEFAULT_SEQ_LENGTH = 4096
"""Tokens of each sequence, unless the model has fewer positions."""

ElementType = Literal["bfloat16", "float16", "float32", "float64"]
"""Element type of the weights of a model that is made from its config."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The batch of one step.

    Attributes:
        batch_size: number of sequences, or of other samples, of all devices together.
        seq_length: tokens of each sequence; 4,096, or as many as the model has, if None.

    Raises:
        OptionError: a number is out of its range.
    """

    batch_size: int = 8
    seq_length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("seq_length", self.seq_length)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}, not 1 or more")

    def of_micro_batch(self, number: int) -> "BatchShape":
        """The batch of a micro-batch, of a number of them.

        Raises:
            OptionError: the number does not divide the batch.

        >>> BatchShape(batch_size=64).of_micro_batch(4).batch_size
        16
        """
        size, rest = divmod(self.batch_size, number)
        if rest:
            raise OptionError(
                f"micro_batches is {number:,}, which does not divide the batch of a step, "
                f"{self.batch_size:,} samples: give a multiple as batch_size"
            )
        return replace(self, batch_size=size)

    def num_tokens(self, num_positions: int | None, source: str) -> int:
        """Tokens of each sequence of a model.

        Args:
            num_positions: that the model has at most; None if it says no number.
            source: name of the config in messages.

        Raises:
            OptionError: there are more than the model has positions.

        >>> BatchShape().num_tokens(2048, "config.json")
        2048
        """
        if self.seq_length is None:
            return min(DEFAULT_SEQ_LENGTH, num_positions or DEFAULT_SEQ_LENGTH)
        if num_positions is not None and self.seq_length > num_positions:
            raise OptionError(
                f"the sequence length is {self.seq_length:,}, but {source} has {num_positions:,} "
                "positions at most (max_position_embeddings)"
            )
        return self.seq_length


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that a model has at most; None if its config says no number.

    >>> num_positions({"model_type": "gpt2", "n_embd": 768, "n_positions": 1024})
    1024
    """
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    # Models with `n_embd` are of the family of GPT; for others `n_positions` is no limit.
    name = "n_positions" if "n_embd" in fields else "max_position_embeddings"
    found = fields.get(name)
    return found if isinstance(found, int) and found > 0 else None


def read_config(source: str | Path) -> dict[str, Any]:
    """Read a config.json, given as its path or that of its folder.

    Raises:
        OptionError: there is no such file, or it is no JSON object.
    """
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise OptionError(f"there is no file {path}")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise OptionError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise OptionError(f"{path} is no JSON object, as the config of a model is")
    return config


def check_named_config(source: str, batch: BatchShape) -> None:
    """Check what can be checked of a named config and its batch before anything is imported.

    Args:
        source: the file of a config or its folder; other names are not checked.
        batch: to export the model with.

    Raises:
        OptionError: the file cannot be read, or the model has fewer positions.
    """
    path = Path(source)
    if path.suffix == ".json" or path.exists():
        batch.num_tokens(num_positions(read_config(path)), source)
