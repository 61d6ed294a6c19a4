"""`PlannedGenerator`: `generate` of transformers with a planned model and its static cache.

wrapped = TorchExportableModuleWithStaticCache(model, batch_size=2, max_cache_len=128)
one = {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}
decode = make_plan(load_graph(export_model(wrapped, (), one)), mesh, inference)
generator = PlannedGenerator(parallelize(wrapped, decode, device_mesh))
tokens = generator.generate(prompt, max_new_tokens=32, do_sample=False)
"""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import PlanError
from autoshard.extras import from_extra
from autoshard.runtime import full_tensor
from autoshard.runtime.parallelize import planned_programs

with from_extra("transformers"):
    from transformers import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutput

_CACHE = "key_cache_0"
"""The buffer whose dim 2 is the number of tokens that the cache holds."""


class PlannedGenerator(GenerationMixin):
    """Generates tokens with a planned `TorchExportableModuleWithStaticCache`.

    `generate` is that of transformers, with its settings, processors of logits, stopping criteria
    and streamers. Tokens that the cache has are not computed again; a prompt is read by the plans
    for most tokens first. Random numbers of sampling are those of rank 0 on all ranks. The model
    must not be called otherwise, since its cache is that of the generator.

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
            raise PlanError(
                f"{type(model).__name__} has no static cache: wrap the model in "
                f"TorchExportableModuleWithStaticCache before it is exported"
            )
        self._model: nn.Module = model
        self._capacity = int(cache.shape[2])
        sizes = {i.shape[1] for p in programs for i in p.stage.inputs if i.target == "input_ids"}
        self._sizes = sorted(sizes, reverse=True)
        self._seen = torch.empty(0, 0, dtype=torch.long)  # tokens that the cache has
        self.config = model.model.config
        self.generation_config = deepcopy(model.model.generation_config)
        self.generation_config.cache_implementation = None
        self.generation_config.use_cache = False  # the cache is in the program
        self.device = torch.device(programs[0].mesh.device_type)
        self.dtype = cache.dtype

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens; takes the arguments of `GenerationMixin.generate`.

        Raises:
            PlanError: prompts are padded, the cache is too small, or no plan takes one token.
        """
        self._share_random_numbers()
        return super().generate(*args, **kwargs)

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
        position = self._in_cache(input_ids)
        self._seen = self._seen[:, :0]  # until all tokens are in the cache
        logits: Any = None
        while position < input_ids.shape[1]:
            size = self._size(input_ids.shape[1] - position)
            places = torch.arange(position, position + size, device=input_ids.device)
            tokens = input_ids[:, position : position + size]
            logits = self._model(input_ids=tokens, cache_position=places)
            position += size
        self._seen = input_ids.clone()
        return CausalLMOutput(logits=full_tensor(logits))

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
