"""Models that a command line can name: a config of transformers, or a function of a Python file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.base.extras import from_extra
from autoshard.errors import ArgumentTypeError, OptionError
from autoshard.graph import MixedPrecision, export_model
from autoshard.plan import Mode
from autoshard.runtime import init_empty_weights

_TOKENS = 4096
"""Tokens of a sequence, unless the request or the model says fewer."""
_FALLBACK = "name a function that returns a model and a batch instead: FILE.py:FUNCTION"


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The batch of one step.

    Attributes:
        batch_size: number of sequences, or of other samples, of all devices together.
        seq_length: tokens of each sequence; by default 4,096, or as many as the model has.

    Raises:
        OptionError: a number is out of its range.
    """

    batch_size: int = 8
    seq_length: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("seq_length", self.seq_length)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}, not 1 or more")


def export_named(
    source: str,
    batch: BatchShape | None = None,
    *,
    mode: Mode = "training",
    mixed_precision: MixedPrecision | None = None,
    any_batch_size: bool = False,
) -> bytes:
    """Export the model that a text names.

    Args:
        source: a `config.json` of transformers, its folder, the name of a model whose config is in
            the Hugging Face cache of this machine, or `FILE.py:FUNCTION`: a function without
            arguments that returns a module and its batch, a tensor, a tuple or a dict of keyword
            arguments. The file is run.
        batch: of a config; by default 8 sequences of 4,096 tokens, or fewer if the model has fewer.
            A function brings its own.
        mode: for a config, whether a loss is part of the graph; a function's module stays in the
            mode it is in.
        mixed_precision: policy under which the model is exported; None for none.
        any_batch_size: True to leave dim 0 of all tensors of the batch dynamic, as one size.

    Returns:
        A `.pt2` archive.

    Raises:
        OptionError: there is no such model, or its class needs code that is not in transformers.
        GraphError: the model cannot be exported.

    >>> archive = export_named("llama/config.json", BatchShape(batch_size=64))  # doctest: +SKIP
    """
    file, colon, function = source.rpartition(":")
    if colon and file.endswith(".py"):
        if batch is not None:
            raise OptionError(f"{source} returns its own batch; leave --batch-size and others out")
        model, args, kwargs = _of_function(Path(file), function)
    else:
        model, args, kwargs = _of_config(source, batch, is_trained=mode == "training")
    return export_model(
        model,
        args,
        kwargs,
        mixed_precision=mixed_precision,
        dynamic_shapes=_batch_dims(model, args, kwargs) if any_batch_size else None,
    )


def _batch_dims(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, dict[int, Any] | None]:
    """The dynamic shapes of a batch whose size is dim 0 of its tensors, by argument of forward."""
    named = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    size = torch.export.Dim("batch", min=2)
    return {
        name: {0: size} if isinstance(given, torch.Tensor) and given.dim() else None
        for name, given in named.items()
    }


def _of_function(file: Path, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if not file.is_file():
        raise OptionError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes look up the module of their class.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{file} has no function {name!r}")
    found = function()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):  # noqa: PLR2004  the model and its batch
        raise ArgumentTypeError(f"{file}:{name} does not return (module, batch)")
    model, batch = found
    if isinstance(batch, Mapping):
        return model, (), dict(batch)
    return model, batch if isinstance(batch, tuple) else (batch,), {}


def _of_config(
    source: str, batch: BatchShape | None, *, is_trained: bool
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    with from_extra("transformers"):
        import transformers  # noqa: PLC0415  an extra, and slow to import

    path = Path(source)
    if path.suffix == ".json" and not path.is_file():
        raise OptionError(f"there is no file {path}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001  configs have checks of their own
        raise _unusable(source, error) from None
    if hasattr(config, "use_cache"):
        config.use_cache = False
    make = _maker_of(config)
    try:
        with init_empty_weights():
            model = make(config).to(getattr(config, "dtype", None) or torch.bfloat16)
    except Exception as error:  # noqa: BLE001  and so have the classes of models
        raise _unusable(source, error) from None
    inputs = _batch_of(model, config, source, batch)
    if not is_trained:
        inputs.pop("labels", None)
    return model.train(is_trained), (), inputs


def _unusable(source: str, error: Exception) -> OptionError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")
    return OptionError(f"{source} is no config of transformers: {reason}; {_FALLBACK}")


def _maker_of(config: Any) -> Callable[[Any], nn.Module]:
    """Maker of a config's model: the class that it names, or that of a language model."""
    import transformers  # noqa: PLC0415  imported by the caller

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if inspect.isclass(found) and issubclass(found, nn.Module):
            return found
    make: Callable[[Any], nn.Module] = transformers.AutoModelForCausalLM.from_config
    return make


def _batch_of(
    model: nn.Module, config: Any, source: str, given: BatchShape | None
) -> dict[str, torch.Tensor]:
    """Keyword arguments of the shape of a batch, without values."""
    parameters = inspect.signature(model.forward).parameters
    name = getattr(model, "main_input_name", "input_ids")
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    batch = given or BatchShape()
    tokens = batch.seq_length or min(_TOKENS, longest or _TOKENS)
    if name != "input_ids" or hasattr(config, "vision_config"):
        raise OptionError(f"{source}: only models of text get a batch from a config; {_FALLBACK}")
    if longest is not None and tokens > longest:
        raise OptionError(
            f"--seq-length {tokens}: {source} has {longest} positions at most "
            "(max_position_embeddings)"
        )
    size = (batch.batch_size, tokens)
    ids = torch.empty(size, dtype=torch.int64, device="meta")
    found = {"input_ids": ids}
    if "labels" in parameters:
        is_per_token = not any("Classification" in kind for kind in config.architectures or ())
        found["labels"] = ids if is_per_token else ids.new_empty(size[:1])
    return found
