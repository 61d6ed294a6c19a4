"""A family of models, built at its published size or at a small one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn

Inputs = dict[str, Any]
Built = tuple[nn.Module, Inputs]
"""A model in training mode and the keyword arguments of its forward."""

Maker = Callable[..., Inputs]
"""Makes the arguments of forward from sizes such as batch and sequence."""

Sizes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        kind: its use, such as diffusion.
        inputs: makes the arguments of forward.
        real: constructor arguments of the published size that are not defaults.
        real_batch: arguments of `inputs` at that size.
        small: constructor arguments of a model that four ranks run in a second.
        small_batch: arguments of `inputs` for it.
        config: name of the config class in transformers; empty for a plain torch model.
        head: name of the model class in transformers.
        model: class of the model, if it is plain torch.
        output: field of the model's result whose mean square is the loss; empty if the model
            computes a loss.
        dtype: of the published model.
        training: build the model in training mode; false if that mode draws random experts, or
            has data-dependent control flow. Plans are for training all the same.
        adapt: changes a model of transformers that cannot be exported as it is, such as one with
            a custom autograd function.
        note: source of the sizes, unless they are the defaults of the config class.
    """

    kind: str
    inputs: Maker
    real_batch: Sizes
    small: Sizes
    small_batch: Sizes
    real: Sizes = field(default_factory=dict)
    config: str = ""
    head: str = ""
    model: Callable[..., nn.Module] | None = None
    output: str = ""
    dtype: torch.dtype = torch.float32
    training: bool = True
    adapt: Callable[[nn.Module], None] | None = None
    note: str = ""

    def build_real(self) -> Built:
        """The published size, on the meta device."""
        with torch.device("meta"):
            model = self._model(self.real).to(self.dtype)
            inputs = _cast(self.inputs(**self.real_batch), self.dtype)
        return model.train(self.training), inputs

    def build_small(self, dtype: torch.dtype = torch.float32) -> Built:
        """A small size, on the CPU, without dropout so that runs can be compared."""
        model = self._model(self.small, dropout=False, grouped=dtype is not torch.float64).to(dtype)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            # Tensors that are neither parameters nor buffers, which `to` does not convert.
            vars(module).update(_cast(vars(module), dtype))
        return model.train(self.training), _cast(self.inputs(**self.small_batch), dtype)

    def _model(self, sizes: Sizes, *, dropout: bool = True, grouped: bool = True) -> nn.Module:
        if self.model is not None:
            return self.model(**sizes)
        config = getattr(transformers, self.config)(**sizes)
        if not dropout:
            _without_dropout(config)
        if not grouped:
            # `_grouped_mm` takes no double numbers.
            config._experts_implementation = "batched_mm"  # noqa: SLF001  there is no other way
        model: nn.Module = getattr(transformers, self.head)(config)
        if self.adapt is not None:
            self.adapt(model)
        return MeanSquare(model, self.output) if self.output else model


class MeanSquare(nn.Module):
    """A model without a loss, with the mean square of an output as its loss."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model, self.output = model, output

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The mean square."""
        result: torch.Tensor = getattr(self.model(**inputs), self.output)
        return result.square().mean()


def _without_dropout(config: Any) -> None:
    """Set every probability of dropping something to zero, in nested configs too."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name == "mask_time_prob"):
            setattr(config, name, 0.0)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Convert floating-point tensors to the model's element type."""
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }


def perceptron(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLUs between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.ReLU()] * bool(layers) + [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def ids(batch: int, sequence: int) -> torch.Tensor:
    """Random token ids that are in every vocabulary here, without padding ids."""
    return torch.randint(3, 60, (batch, sequence))


def decoder(batch: int, sequence: int) -> Inputs:
    """Inputs of a causal language model."""
    tokens = ids(batch, sequence)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def scan_decoder(batch: int, sequence: int) -> Inputs:
    """Inputs of a causal language model without the argument `use_cache`."""
    tokens = ids(batch, sequence)
    return {"input_ids": tokens, "labels": tokens}


def masked(batch: int, sequence: int) -> Inputs:
    """Inputs of a masked language model."""
    tokens = ids(batch, sequence)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def features(batch: int, sequence: int) -> Inputs:
    """Inputs of a text encoder."""
    tokens = ids(batch, sequence)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def translation(batch: int, source: int, target: int) -> Inputs:
    """Inputs of an encoder-decoder model."""
    return {
        "input_ids": ids(batch, source),
        "attention_mask": torch.ones(batch, source, dtype=torch.long),
        "labels": ids(batch, target),
        "use_cache": False,
    }


def image(batch: int, pixels: int) -> Inputs:
    """Images without labels."""
    return {"pixel_values": torch.randn(batch, 3, pixels, pixels)}


def labelled_image(batch: int, pixels: int, classes: int) -> Inputs:
    """Images with a class each."""
    return image(batch, pixels) | {"labels": torch.randint(0, classes, (batch,))}


def segmented_image(batch: int, pixels: int, classes: int) -> Inputs:
    """Images with a class for each pixel."""
    return image(batch, pixels) | {"labels": torch.randint(0, classes, (batch, pixels, pixels))}


def masked_image(batch: int, pixels: int) -> Inputs:
    """Images with a pixel mask of ones."""
    mask = torch.ones(batch, pixels, pixels, dtype=torch.long)
    return image(batch, pixels) | {"pixel_mask": mask}


def image_and_text(batch: int, pixels: int, sequence: int) -> Inputs:
    """Images with a caption each."""
    return image(batch, pixels) | features(batch, sequence) | {"return_loss": True}


def video(batch: int, frames: int, pixels: int, classes: int) -> Inputs:
    """Videos with a class each."""
    return {
        "pixel_values": torch.randn(batch, frames, 3, pixels, pixels),
        "labels": torch.randint(0, classes, (batch,)),
    }


def spectrogram(batch: int, bins: int, frames: int, target: int) -> Inputs:
    """Speech as a spectrogram, and its text."""
    return {
        "input_features": torch.randn(batch, bins, frames),
        "labels": ids(batch, target),
        "use_cache": False,
    }


def labelled_spectrogram(batch: int, frames: int, bins: int, classes: int) -> Inputs:
    """Sounds as spectrograms, with a class each."""
    return {
        "input_values": torch.randn(batch, frames, bins),
        "labels": torch.randint(0, classes, (batch,)),
    }


def waveform(batch: int, samples: int) -> Inputs:
    """Sounds as samples."""
    return {"input_values": torch.randn(batch, samples)}


def series(batch: int, steps: int, channels: int, horizon: int) -> Inputs:
    """Time series, and their continuation."""
    return {
        "past_values": torch.randn(batch, steps, channels),
        "future_values": torch.randn(batch, horizon, channels),
    }
