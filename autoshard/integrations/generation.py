"""`PlannedGenerator`: `generate` of transformers with a planned model and its static cache.

wrapped = TorchExportableModuleWithStaticCache(model, batch_size=2, max_cache_len=128)
one = {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}
decode = make_plan(load_graph(export_model(wrapped, (), one)), mesh, inference)
planned = parallelize(wrapped, decode, device_mesh)
generator = PlannedGenerator(planned)
tokens = generator.generate(prompt, max_new_tokens=32, do_sample=False)
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.base.extras import from_extra
from autoshard.errors import PlanError
from autoshard.runtime import full_tensor
from autoshard.runtime.checks.agreement import digest_of, numbers_of_all_ranks
from autoshard.runtime.parallelize import planned_programs
from autoshard.torch_private import pytree

with from_extra("transformers"):
    from transformers import GenerationMixin
    from transformers.generation.configuration_utils import GenerationMode
    from transformers.modeling_outputs import CausalLMOutput

_CACHE = "key_cache_0"
"""The buffer whose dim 2 is the number of tokens that the cache holds."""


_MODES = (
    *(GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
    *(GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE),
)
"""Ways of decoding that need no more than the logits of the next token."""

_UNSHARDED = (
    "generate with an unsharded model that has the full weights, as after "
    "unsharded.load_state_dict(full_tensor(planned.model.state_dict())) on every rank"
)


class PlannedGenerator(GenerationMixin):
    """Generates tokens with a planned `TorchExportableModuleWithStaticCache`.

    `generate` is that of transformers, with its settings, processors of logits, stopping criteria
    and streamers. Tokens that the cache has are not computed again; a prompt is read by the plans
    for most tokens first. Random numbers of sampling are those of rank 0 on all ranks. The model
    must not be called otherwise, since its cache is that of the generator. All ranks pass the same
    prompts, at most as many as the cache has rows, times beams or returned sequences; or a DTensor
    of those that each has.

    Args:
        model: returned by `parallelize`, with a plan for one token, and possibly others for
            prompts of certain lengths.

    Raises:
        PlanError: the model was not returned by `parallelize`, or has no static cache.
    """

    main_input_name = "input_ids"
    input_modalities = ("text",)
    base_model_prefix = ""
    _is_stateful = False

    def __init__(self, model: Any) -> None:
        programs = planned_programs(model)
        cache = dict(model.named_buffers()).get(_CACHE)
        if cache is None:
            raise PlanError(_without_cache(model))
        self._model: nn.Module = model
        self._mesh = programs[0].mesh
        self._rows, self._capacity = int(cache.shape[0]), int(cache.shape[2])
        sizes = {i.shape[1] for p in programs for i in p.stage.inputs if i.target == "input_ids"}
        self._sizes = sorted(sizes, reverse=True)
        self._seen = torch.empty(0, 0, dtype=torch.long)  # tokens that the cache has
        self.config = model.model.config
        self.generation_config = deepcopy(model.model.generation_config)
        self.generation_config.cache_implementation = None
        self.generation_config.use_cache = False  # the cache is in the program
        self.device = torch.device(self._mesh.device_type)
        self.dtype = cache.dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens; takes the arguments of `GenerationMixin.generate`.

        Raises:
            PlanError: ranks pass different prompts; prompts are padded; the cache is too small; the
                planned program does not return or take what is needed; no plan takes one token.
        """
        args, kwargs = full_tensor((args, kwargs))
        _check_alike(pytree.tree_leaves((args, kwargs)), self._mesh)
        self._share_random_numbers()
        return super().generate(*args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Check the arguments of the model that a caller of `generate` passes."""
        for name, value in model_kwargs.items():
            if name == "attention_mask" or value is None or value is False:
                continue
            if not _are_usual(name, value):
                raise PlanError(
                    f"{name!r} has no effect on the planned program, whose arguments are input_ids "
                    f"and cache_position: leave it out, or {_UNSHARDED}"
                )

    def _validate_generation_mode(self, mode: Any, settings: Any, options: dict[str, Any]) -> None:
        """Check that the planned program has what a way of decoding needs."""
        if mode not in _MODES:
            raise PlanError(
                f"the mode {mode.value} of generate needs more than the logits of the next token, "
                f"which the planned program returns: leave it out, or {_UNSHARDED}"
            )
        names = ("output_hidden_states", "output_attentions")
        for name in filter(lambda name: getattr(settings, name), names):
            raise PlanError(f"the planned program has no {name}: leave it out, or {_UNSHARDED}")
        settings.prefill_chunk_size = None  # the plans decide how prompts are divided
        super()._validate_generation_mode(mode, settings, options)

    def _share_random_numbers(self) -> None:
        """Continue the random numbers of rank 0 on all ranks, which then sample the same tokens."""
        sources: list[Any] = [torch.random]
        if self.device.type != "cpu":
            sources.append(torch.get_device_module(self.device))
        states = [source.get_rng_state() for source in sources]
        dist.broadcast_object_list(states, src=0)
        for source, state in zip(sources, states, strict=True):
            source.set_rng_state(state)

    def get_experts_implementation(self) -> dict[str, str]:
        """The implementations of experts, which generation may change: none, they are planned."""
        return {}

    def can_generate(self) -> bool:
        """True: it generates."""
        return True

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> dict[str, Any]:
        """The arguments of a step: all tokens so far."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def __call__(self, *args: Any, **kwargs: Any) -> CausalLMOutput:
        """Run `forward`."""
        return self.forward(*args, **kwargs)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        """Logits of the last token, from the cache and the tokens that it does not have yet."""
        if attention_mask is not None and not attention_mask.all():
            raise PlanError(
                "prompts are padded, and the planned program has no mask for them: generate from "
                "prompts of one length together"
            )
        if input_ids.shape[1] > self._capacity:
            raise PlanError(
                f"the cache holds {self._capacity} tokens, and {input_ids.shape[1]} are needed: "
                f"plan with a larger max_cache_len, or generate fewer"
            )
        missing = self._rows - len(input_ids)
        if missing < 0:
            raise PlanError(
                f"the cache has {self._rows} rows, and {len(input_ids)} are needed, one for each "
                f"prompt and beam or returned sequence: generate from fewer prompts at a time, or "
                f"wrap the model with batch_size={len(input_ids)}, export it and plan again"
            )
        position = self._in_cache(input_ids)
        self._seen = self._seen[:, :0]  # until all tokens are in the cache
        logits: Any = None
        while position < input_ids.shape[1]:
            size = self._size(input_ids.shape[1] - position)
            places = torch.arange(position, position + size, device=input_ids.device)
            tokens = input_ids[:, position : position + size].long()
            rows = torch.cat([tokens, tokens[-1:].expand(missing, -1)])  # rows do not mix
            logits = self._model(input_ids=rows, cache_position=places)
            position += size
        self._seen = input_ids.clone()
        return CausalLMOutput(logits=full_tensor(logits)[: len(input_ids)])

    def _in_cache(self, input_ids: torch.Tensor) -> int:
        """Number of tokens that need not be computed; the last one always is."""
        size = self._seen.shape[1]
        begun = self._seen.shape[0] == len(input_ids) and size < input_ids.shape[1]
        same = begun and torch.equal(self._seen.to(input_ids.device), input_ids[:, :size])
        return size if same else 0

    def _size(self, most: int) -> int:
        """The most tokens that a plan takes at once."""
        for size in self._sizes:
            if size <= most:
                return size
        raise PlanError(
            f"no plan takes {most} tokens, only {self._sizes}: add one for a single token"
        )


def _without_cache(model: nn.Module) -> str:
    """The advice for a model that has no static cache."""
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return (
            f"{name} has an encoder, whose generate is not planned: generate with an unsharded "
            f"model that has the full weights, as after "
            f"unsharded.load_state_dict(full_tensor(planned.state_dict())) on every rank"
        )
    return (
        f"{name} has no static cache: wrap the model in TorchExportableModuleWithStaticCache "
        f"before it is exported"
    )


def _are_usual(name: str, value: Any) -> bool:
    """True for positions from 0 on, with which models generate if none are passed."""
    if name != "position_ids" or not isinstance(value, torch.Tensor):
        return False
    usual = torch.arange(value.shape[-1], device=value.device).expand(value.shape)
    return torch.equal(value, usual.to(value.dtype))


def _check_alike(given: Sequence[Any], mesh: DeviceMesh) -> None:
    """Check that all ranks pass the same tensors, numbers and texts to `generate`.

    Raises:
        PlanError: two ranks differ, on all ranks alike.
    """
    contents = [
        f"{tuple(x.shape)} {digest_of(x)}" if isinstance(x, torch.Tensor) else repr(x)
        for x in given
        if isinstance(x, torch.Tensor | int | float | str)
    ]
    own = torch.tensor([digest_of(" ".join(contents))], dtype=torch.int64)
    found = numbers_of_all_ranks(own, mesh).flatten().tolist()
    ranks = mesh.mesh.flatten().tolist()
    other = next((rank for rank, x in zip(ranks, found, strict=True) if x != found[0]), None)
    if other is not None:
        raise PlanError(
            f"ranks {ranks[0]} and {other} pass different prompts or settings to generate, but "
            f"together they run one batch: pass all prompts on every rank, or those of each rank "
            f"as a DTensor, as in DTensor.from_local(ids, device_mesh, [Shard(0)] * "
            f"device_mesh.ndim); the result has the rows of all"
        )
