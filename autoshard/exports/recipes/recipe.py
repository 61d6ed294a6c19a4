"""`Recipe`: the settings of a framework that decide layout, memory and batch of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autoshard.errors import OptionError

Pattern = Literal["megatron", "torchtitan", "data", "layers"]
"""Models with Megatron-LM's layers; with torchtitan's; any model, data-parallel; with a tp_plan."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a framework, in its own terms.

    Attributes:
        framework: its name, for messages.
        pattern: which layers it shards, and how.
        num_ranks: number of ranks that the recipe itself states; None if it does not.
        pipeline: pipeline ranks.
        replicate: data-parallel ranks that replicate parameters; None for all that are left.
        shard: data-parallel ranks that shard parameters; None for all that are left.
        context: ranks that share a sequence.
        tensor: tensor-parallel ranks; 0 for all ranks.
        experts: ranks that share the experts of a layer.
        expert_tensor: tensor-parallel ranks of one expert; as `tensor` if None.
        zero: stage of ZeRO: 1 shards the optimizer's state, 2 gradients too, 3 parameters too.
        sequence_parallel: True if tensor-parallel ranks also shard sequences between layers.
        repeats_kv_heads: True if ranks repeat heads of keys where there are fewer than ranks.
        stages_per_rank: pipeline stages of a rank.
        layers_per_stage: layers of a pipeline stage, instead of `stages_per_rank`.
        num_layers: number of layers that the recipe itself states.
        first_layers: layers of the first pipeline rank, if not as many as others.
        last_layers: layers of the last one.
        layers_of_stages: layers of each pipeline stage, if the recipe lists them.
        counts_embedding: True if the embedding counts as a layer of the first rank.
        counts_loss: True if the loss counts as a layer of the last rank.
        micro_batch: sequences of a micro-batch of a data-parallel rank.
        global_batch: sequences of a step of all ranks.
        accumulation: number of micro-batches of a step.
        seq_length: tokens of a sequence.
        experts_in_node: True if the exchange with experts works within an NVLink domain only.
        tp_plan: style of each module, by pattern of its name.
        options: further options of planning, by keyword.
        problems: reasons why the framework refuses these settings, whatever the model.
        unread: settings that change layout or memory, and are not modelled.
        chosen: settings that options of planning cannot fix, and what a plan has instead.
    """

    framework: str
    pattern: Pattern
    num_ranks: int | None = None
    pipeline: int = 1
    replicate: int | None = 1
    shard: int | None = None
    context: int = 1
    tensor: int = 1
    experts: int = 1
    expert_tensor: int | None = None
    zero: int = 0
    sequence_parallel: bool = False
    repeats_kv_heads: bool = False
    stages_per_rank: int = 1
    layers_per_stage: int | None = None
    num_layers: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    layers_of_stages: tuple[int, ...] | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    seq_length: int | None = None
    experts_in_node: bool = False
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()

    def on(self, num_ranks: int) -> "Recipe":
        """The recipe on a number of ranks, which are all tensor-parallel if it says so."""
        return self if self.tensor else replace(self, tensor=num_ranks)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that have parts of one replica of the batch."""
        return self.pipeline * self.context * self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks of one pipeline stage that share the experts of a layer, with parts of experts."""
        inside = self.tensor if self.expert_tensor is None else self.expert_tensor
        return self.experts * inside if self.experts > 1 else 1

    def data_ranks(self, num_ranks: int) -> int:
        """Number of data-parallel ranks.

        Raises:
            OptionError: the degrees do not divide the ranks.
        """
        return divided(num_ranks, self.model_ranks, "ranks", "the model-parallel sizes")

    def replicas(self, num_ranks: int) -> int:
        """Number of groups of data-parallel ranks that replicate parameters.

        Raises:
            OptionError: the degrees do not divide the ranks.
        """
        if self.replicate is not None:
            return self.replicate
        data = self.data_ranks(num_ranks)
        return divided(data, self.shard or 1, "data-parallel ranks", "those that shard parameters")


def divided(number: int, divisor: int, what: str, of: str) -> int:
    """A quotient without remainder.

    Raises:
        OptionError: there is a remainder.
    """
    if number % divisor:
        raise OptionError(f"{number} {what} cannot be divided by {divisor}, {of}")
    return number // divisor
