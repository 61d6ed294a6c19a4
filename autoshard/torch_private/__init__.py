"""Private parts of PyTorch that the library relies on, and the check that they are there.

Nothing else in the library names them. Each says what it relies on, and why nothing public does;
they hold for all versions from `OLDEST` to `NEWEST` unless they say otherwise. Where another torch
would not fail by itself but compute other numbers, `checks.py` tries the part; `parallelize` and
`pipeline` run the checks. May import `autoshard.errors` alone.
"""

from typing import TYPE_CHECKING

from autoshard.lazy_imports import lazy_names

if TYPE_CHECKING:
    from autoshard.torch_private.checks import (
        checks_of_dtensors,
        checks_of_pipelines,
        checks_of_tensors,
    )
    from autoshard.torch_private.compiling import (
        compiled,
        end_graph,
        has_compiler,
        leave_backward_uncompiled,
        not_compiled,
        not_traced,
        note_uncompiled,
        without_compiler,
    )
    from autoshard.torch_private.distributed import (
        COLLECTIVES,
        default_store,
        replace_distribute_tensors,
        replace_state_dicts,
        replace_total_norm,
        torch_distribute_tensors,
        torch_model_state_dict,
        torch_optimizer_state_dict,
        torch_total_norm,
    )
    from autoshard.torch_private.dtensors import (
        DeferredShard,
        DTensorSpec,
        dtensor_of,
        operator_handlers,
        spec_of,
        stored_shard,
        strided_shard,
        take_shard,
    )
    from autoshard.torch_private.pipelining import StageBase, num_micro_batches, without_set_up
    from autoshard.torch_private.tensors import (
        BatchNormBase,
        DataDependentOutputException,
        DropoutBase,
        FakeTensorMode,
        HigherOrderOperator,
        OpOverload,
        OpOverloadPacket,
        TorchDispatchMode,
        accumulates,
        assert_on_device,
        backward_pass,
        call_with_hooks,
        checkpointed,
        decomposition_table,
        given_num_samples,
        has_gradient_hooks,
        is_transformed,
        operator_names,
        overload_name,
        own_buffers,
        own_parameters,
        pytree,
        runs_backward,
        safe_softmax,
        schema_of,
        serialize,
        shares_memory,
        tensor_without_memory,
        version_counter,
        without_checkpoints,
        without_torch_function,
    )
    from autoshard.torch_private.versions import NEWEST, OLDEST, check_parts
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "COLLECTIVES",
    "NEWEST",
    "OLDEST",
    "BatchNormBase",
    "DTensorSpec",
    "DataDependentOutputException",
    "DeferredShard",
    "DropoutBase",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "StageBase",
    "TorchDispatchMode",
    "accumulates",
    "assert_on_device",
    "backward_pass",
    "call_with_hooks",
    "check_parts",
    "checkpointed",
    "checks_of_dtensors",
    "checks_of_pipelines",
    "checks_of_tensors",
    "compiled",
    "decomposition_table",
    "default_store",
    "dtensor_of",
    "end_graph",
    "given_num_samples",
    "has_compiler",
    "has_gradient_hooks",
    "is_transformed",
    "leave_backward_uncompiled",
    "not_compiled",
    "not_traced",
    "note_uncompiled",
    "num_micro_batches",
    "operator_handlers",
    "operator_names",
    "overload_name",
    "own_buffers",
    "own_parameters",
    "pytree",
    "replace_distribute_tensors",
    "replace_state_dicts",
    "replace_total_norm",
    "runs_backward",
    "safe_softmax",
    "schema_of",
    "serialize",
    "shares_memory",
    "spec_of",
    "stored_shard",
    "strided_shard",
    "take_shard",
    "tensor_without_memory",
    "torch_distribute_tensors",
    "torch_model_state_dict",
    "torch_optimizer_state_dict",
    "torch_total_norm",
    "version_counter",
    "without_checkpoints",
    "without_compiler",
    "without_set_up",
    "without_torch_function",
]
