import pytest

from autoshard.cli.rendering.wording import in_flags


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the time limit ended; raise time_limit", "the time limit ended; raise --time-limit"),
        ("plan with mode 'inference', or export", "plan with --mode inference, or export"),
        ("take another number, or sub_meshes='any'", "take another number, or --sub-meshes any"),
        ("or for stages=1 without cuts", "or for --stages 1 without cuts"),
        ("memory_budget: Input should be greater", "--memory: Input should be greater"),
        ("balance: the program has neither", "--balance: the program has neither"),
        ("give `cuts` instead of `pins`", "give --cut instead of --pin"),
        ("num_devices is 0; a mesh has 1", "--devices is 0; a mesh has 1"),
        ("(FSDP's reshard_after_forward)", "(FSDP's reshard_after_forward)"),
        ("the mode of stages and cuts", "the mode of stages and cuts"),
        ("model.time_limit and /a/time_limit_b.json", "model.time_limit and /a/time_limit_b.json"),
    ],
)
def test_messages_name_options_as_on_the_command_line(message: str, shown: str) -> None:
    assert in_flags(message) == shown
