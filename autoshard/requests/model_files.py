"""Models that a command line can name: a config of transformers, or a function of a Python file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn

from autoshard.base.extras import from_extra
from autoshard.errors import ArgumentTypeError, OptionError
from autoshard.graph import MixedPrecision, export_model
from autoshard.plan import Mode
from autoshard.requests.model_configs import BatchShape, ElementType
from autoshard.runtime import init_empty_weights

_FALLBACK = "name a function that returns a model and a batch instead: FILE.py:FUNCTION"

_TOKENS = "input_ids"
"""Name of the argument of a model of text."""

_MAX_REASON = 300
"""Largest number of characters of another library's message in one of ours."""


@dataclass(frozen=True)
class _Source:
    """A config of transformers.

    Attributes:
        path: file, folder, or name in the Hugging Face cache.
        name: in messages.
        instead: another way to give the model, in messages.
    """

    path: str
    name: str
    instead: str = _FALLBACK

    def unusable(self, reason: object) -> OptionError:
        """The error of a config of which no model can be made."""
        first = (str(reason).splitlines() or [type(reason).__name__])[0].rstrip(".:")
        text = f"{self.name} is no config of transformers: {first[:_MAX_REASON]}; {self.instead}"
        return OptionError(text)


def export_named(
    source: str,
    batch: BatchShape | None = None,
    *,
    mode: Mode = "training",
    dtype: ElementType | None = None,
    mixed_precision: MixedPrecision | None = None,
    any_batch_size: bool = False,
) -> bytes:
    """Export the model that a text names.

    Args:
        source: a `config.json` of transformers, its folder, the name of a model whose config is in
            the Hugging Face cache of this machine, or `FILE.py:FUNCTION`: a function without
            arguments that returns a module and its batch, a tensor, a tuple or a dict of keyword
            arguments. The file is run.
        batch: of a config, 8 sequences by default; a function brings its own.
        mode: for a config, whether a loss is part of the graph; a function's module stays in the
            mode it is in.
        dtype: element type of a config's weights, if it is not the config's own.
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
        if batch is not None or dtype is not None:
            raise OptionError(
                f"{source} returns its own model and batch; leave --batch-size and others out"
            )
        model, args, kwargs = _of_function(Path(file), function)
    else:
        model, args, kwargs = _of_config(_Source(source, source), batch, mode, dtype)
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


@contextmanager
def config_file(config: bytes) -> Iterator[str]:
    """The path of a config, for transformers, which reads configs from files.

    The file has no name, so that a process that is killed leaves none.
    """
    with TemporaryFile() as file:
        file.write(config)
        file.flush()
        yield f"/dev/fd/{file.fileno()}"


def export_config(
    path: str,
    batch: BatchShape | None = None,
    *,
    mode: Mode = "training",
    dtype: ElementType | None = None,
) -> bytes:
    """Export the model of a `config_file`; as `export_named`.

    Raises:
        OptionError: it is no config of a model of the installed transformers.
        GraphError: the model cannot be exported.
    """
    source = _Source(path, "the config", "give a graph instead")
    return export_model(*_of_config(source, batch, mode, dtype))


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
    source: _Source, batch: BatchShape | None, mode: Mode, dtype: ElementType | None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    batch, is_trained = batch or BatchShape(), mode == "training"
    with from_extra("transformers"):
        import transformers  # noqa: PLC0415  an extra, and slow to import

    try:
        config = transformers.AutoConfig.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001  configs have checks of their own
        raise source.unusable(error) from None
    if hasattr(config, "use_cache"):
        config.use_cache = False
    make = _maker_of(config, source)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    num_tokens = batch.num_tokens(positions, source.name)
    element_type = getattr(torch, dtype) if dtype else getattr(config, "dtype", None)
    try:
        with init_empty_weights():
            model = make(config).to(element_type or torch.bfloat16)
    except Exception as error:  # noqa: BLE001  and so have the classes of models
        raise source.unusable(error) from None
    if getattr(model, "main_input_name", _TOKENS) != _TOKENS:
        raise _not_of_text(source)
    inputs = _inputs_of(model, config, (batch.batch_size, num_tokens), is_trained=is_trained)
    return model.train(is_trained), (), inputs


def _maker_of(config: Any, source: _Source) -> Callable[[Any], nn.Module]:
    """Maker of a config's model: the class that it names, or that of a language model."""
    import transformers  # noqa: PLC0415  imported by the caller

    if hasattr(config, "vision_config"):
        raise _not_of_text(source)
    for name in config.architectures or ():
        found: Any = getattr(transformers, str(name), None)
        if found is None and str(name).endswith("ForCausalLM"):
            break
        is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
        if not is_model:
            raise source.unusable(f"transformers has no model {name!r} (architectures)")
        if not isinstance(config, found.config_class or ()):
            raise source.unusable(f"{name} is no model of the type {config.model_type!r}")
        if found.main_input_name != _TOKENS:
            raise _not_of_text(source)
        named: Callable[[Any], nn.Module] = found
        return named
    make: Callable[[Any], nn.Module] = transformers.AutoModelForCausalLM.from_config
    return make


def _not_of_text(source: _Source) -> OptionError:
    return OptionError(
        f"{source.name}: only models of text get a batch from a config; {source.instead}"
    )


def _inputs_of(
    model: nn.Module, config: Any, size: tuple[int, int], *, is_trained: bool
) -> dict[str, torch.Tensor]:
    """Keyword arguments of the shape of a batch, without values."""
    ids = torch.empty(size, dtype=torch.int64, device="meta")
    found = {_TOKENS: ids}
    if is_trained and "labels" in inspect.signature(model.forward).parameters:
        is_per_token = not any("Classification" in kind for kind in config.architectures or ())
        found["labels"] = ids if is_per_token else ids.new_empty(size[:1])
    return found
