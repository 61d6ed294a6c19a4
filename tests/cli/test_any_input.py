"""Commands with right and wrong input of all kinds: each ends with a status and a message.

None gives a traceback, an error as the operating system words it, or an empty message.
"""

import re
from pathlib import Path

import pytest
from support.command_line import autoshard
from support.models import meta, mlp
from support.other_files import OTHERS

from autoshard.graph import export_model

PLAN = "plan graph.pt2 --mesh 2 --no-cache "
SEARCH = "search graph.pt2 --no-cache "

COMMANDS: list[tuple[str, int, str]] = [
    # The command itself
    ("--version", 0, "autoshard 0"),
    ("-h", 0, "Usage: autoshard"),
    ("--help", 0, "Make plans"),
    ("", 2, "Usage: autoshard"),
    ("plna", 2, "Did you mean 'plan'"),
    ("--verbose", 2, "No such option: --verbose"),
    ("plan -h", 0, "--mesh"),
    ("plan --help", 0, "Memory per device"),
    ("plan", 2, "Missing"),
    ("plan graph.pt2", 1, "give one of --mesh and --gpus"),
    ("plan graph.pt2 --mseh 2", 2, "--mesh"),
    ("show", 2, "Missing argument"),
    ("cache", 2, "Usage: autoshard cache"),
    ("cache lss", 2, "Did you mean 'ls'"),
    ("keys -h", 0, "revoke"),
    ("mase -h", 0, "pins"),
    # Graphs
    (PLAN, 0, "Predicted step: "),
    ("plan none.pt2 --mesh 2", 1, "there is no file none.pt2"),
    ("plan folder --mesh 2", 1, "folder is a folder; give the name of a file in it"),
    ("plan secret/graph.pt2 --mesh 2", 1, "there is no file secret/graph.pt2"),
    ("plan plan.json --mesh 2", 1, "plan.json is a plan, not an exported graph"),
    ("plan half.pt2 --mesh 2", 1, "half.pt2 is not a readable .pt2 archive"),
    ("plan half.json --mesh 2", 1, "half.json is "),
    ("plan list.json --mesh 2", 1, "list.json is a JSON file of another kind"),
    ("coverage graph.pt2 --no-cache", 0, "0 of 3 calls are replicated"),
    ("coverage graph.pt2 plan.json --no-cache", 0, "of a step of"),
    ("coverage graph.pt2 graph.pt2", 1, "graph.pt2: this is an exported graph, not a plan"),
    ("coverage none.pt2", 1, "there is no file none.pt2"),
    ("coverage train.py", 1, "train.py is a Python program"),
    ("check none.pt2 plan.json", 1, "there is no file none.pt2"),
    ("check plan.json graph.pt2", 1, "this is an exported graph, not a plan"),
    ("check graph.pt2 plan.json", 0, "predicted cost verified"),
    ("check other.pt2 plan.json", 1, "graph"),
    *(
        (f"plan {name} --mesh 2 --no-cache", 1, f"{name} is ")
        for name in OTHERS
        if name != "config.json"
    ),
    # Meshes and topologies
    (PLAN + "--mesh two", 1, "two"),
    (PLAN + "--mesh 0", 1, "0"),
    (PLAN + "--mesh -2", 1, "-2"),
    (PLAN + "--mesh 2,,2", 1, "2,,2"),
    (PLAN + "--mesh 2.5", 1, "2.5"),
    (PLAN + "--mesh 99999999999", 1, "99999999999"),
    (PLAN + "--axes a,b", 1, "axis names"),
    (PLAN + "--mesh 2,2 --axes a,a", 1, "a"),
    (PLAN + "--topology abacus", 1, "abacus"),
    (PLAN + "--topology none.json", 1, "there is no file none.json"),
    (PLAN + "--topology config.json", 1, "a Hugging Face model, not a topology"),
    (PLAN + "--topology noise.json", 1, "noise.json"),
    (PLAN + "--topology folder.json", 1, "folder.json is a folder"),
    (PLAN + "--topology topology.json", 0, "Predicted step: "),
    (PLAN + "--topology plan.json", 1, "this is a plan, not a topology"),
    (PLAN + "--intra-bandwidth -1 --inter-bandwidth 1", 1, "bandwidth"),
    (PLAN + "--mesh 2,2 --intra-bandwidth 1e9", 1, "--inter-bandwidth"),
    (PLAN + "--inter-bandwidth 1e9", 1, "--intra-bandwidth"),
    # Options of planning
    (PLAN + "--memory much", 1, "much"),
    (PLAN + "--memory -1GB", 1, "-1GB"),
    (PLAN + "--memory 1MB", 3, "the smallest feasible"),
    (PLAN + "--memory-budget 1MB", 3, "the smallest feasible"),
    (PLAN + "--memory 80GB", 0, "Predicted step: "),
    (PLAN + "--mode dreaming", 2, "inference"),
    (PLAN + "--mode inference", 0, "Predicted step: "),
    (PLAN + "--mode inference --micro-batches 2", 1, "--micro-batches"),
    (PLAN + "--optimizer luck", 2, "adamw"),
    (PLAN + "--state-dtype int3", 2, "bfloat16"),
    (PLAN + "--micro-batches 0", 2, "--micro-batches"),
    (PLAN + "--micro-batches many", 2, "many"),
    (PLAN + "--in-flight 5", 1, "--in-flight is 5"),
    (PLAN + "--time-limit 0", 1, "--time-limit"),
    (PLAN + "--time-limit nan", 1, "--time-limit"),
    (PLAN + "--time-limit soon", 2, "soon"),
    (PLAN + "--stages nine", 1, "--stages"),
    (PLAN + "--stages 0", 1, "--stages"),
    (PLAN + "--stages 99", 1, "99"),
    (PLAN + "--schedule best", 2, "1F1B"),
    (PLAN + "--balance luck", 1, "--balance"),
    (PLAN + "--balance 1,2,3", 1, "balance"),
    (PLAN + "--cut middle", 1, "--cut"),
    (PLAN + "--cut before:none", 1, "none"),
    (PLAN + "--sub-meshes odd", 2, "equal"),
    (PLAN + "--stages-per-rank x", 1, "--stages-per-rank"),
    (PLAN + "--algo genetic", 2, "megatron"),
    (PLAN + "--algo megatron", 0, "Predicted step: "),
    (PLAN + "--pin up.weight", 1, "KIND:NAME=LAYOUT"),
    (PLAN + "--pin thing:up.weight=R", 1, "KIND:NAME=LAYOUT"),
    (PLAN + "--pin parameter:nothing=R", 1, "nothing"),
    (PLAN + "--pin parameter:up.weight=S(7)", 1, "S(7)|Shard(7)"),
    (PLAN + "--pin parameter:up.weight=Q", 1, "Q"),
    (PLAN + "--pin parameter:up.weight=R,R", 1, "1|one"),
    (PLAN + "--pin parameter:up.weight=S(0)", 0, "Predicted step: "),
    (PLAN + "--forbid telepathy", 1, "telepathy|all_reduce"),
    (PLAN + "--forbid all_reduce@zz", 1, "zz"),
    (PLAN + "--forbid all_reduce", 0, "Predicted step: "),
    (PLAN + "--batch-axis zz", 1, "zz"),
    (PLAN + "--stored-as none.json", 1, "there is no file none.json"),
    (PLAN + "--stored-as graph.pt2", 1, "this is an exported graph, not a plan"),
    (PLAN + "--import no_such_module_here", 1, "no_such_module_here"),
    (PLAN + "--server nonsense", 1, "not an address such as"),
    (PLAN + "--server http://127.0.0.1:9", 1, "127.0.0.1:9"),
    (PLAN + "--cache graph.pt2/x", 0, "Predicted step: "),
    (PLAN + "--json", 0, '"certificate"'),
    (PLAN + "--quiet -o made.json", 0, "Predicted step: "),
    (PLAN + "-o none/made.json", 1, "there is no folder none; create it first"),
    (PLAN + "-o folder", 1, "it is a folder"),
    (PLAN + "-o graph.pt2/made.json", 1, "graph.pt2 is not a folder"),
    # Searches
    (SEARCH + "--devices 2 --workers 1", 0, "best first"),
    (SEARCH + "--devices 0", 2, "--devices"),
    (SEARCH + "--devices -4", 2, "--devices"),
    (SEARCH + "--devices two", 2, "two"),
    (SEARCH + "--devices 2 --workers 0", 2, "--workers"),
    (SEARCH + "--devices 2 --max-axes 0", 2, "--max-axes"),
    (SEARCH + "--devices 2 -o none/made.json", 1, "create it first"),
    ("coverage config.json", 1, "config.json is the configuration"),
    # Reading plans
    ("show plan.json", 0, "Predicted step: "),
    ("show none.json", 1, "there is no file none.json"),
    ("show graph.pt2", 1, "this is an exported graph, not a plan"),
    ("show model.safetensors", 1, "model.safetensors: this is a file of weights"),
    ("show empty.pt2", 1, "this is empty"),
    ("show config.json", 1, "configuration of a Hugging Face model"),
    ("show noise.bin", 1, "noise.bin"),
    ("show half.json", 1, "half.json"),
    ("show folder", 1, "folder is a folder"),
    ("show " + "0" * 64, 1, "AUTOSHARD_SERVER"),
    ("show http://127.0.0.1:9/v1/plans/" + "0" * 64, 1, "127.0.0.1:9"),
    ("show none-found.json", 0, "the smallest feasible"),
    ("explain plan.json up", 0, "stands for|chosen"),
    ("explain plan.json up.weight", 0, "chosen"),
    ("explain plan.json *.weight", 0, "stands for 2 choices"),
    ("explain plan.json *", 0, "stands for"),
    ("explain plan.json upp.weight", 1, "did you mean"),
    ("explain plan.json none.*", 1, "none.*"),
    ("explain graph.pt2 up", 1, "this is an exported graph, not a plan"),
    ("explain none-found.json up", 1, "no plan to explain"),
    ("compare plan.json plan.json", 0, "the same"),
    ("compare plan.json plan4.json", 0, "before"),
    ("compare plan.json graph.pt2", 1, "this is an exported graph, not a plan"),
    ("compare plan.json none-found.json", 1, "no plan"),
    ("export plan.json --to parallelize-module", 1, "not tensor-parallel"),
    ("export sharded.json --to parallelize-module", 0, "parallelize_module"),
    ("export plan.json --to jax", 1, "jax"),
    ("export plan.json", 2, "--to"),
    ("export none.json --to fsdp2", 1, "there is no file none.json"),
    ("export plan.json --to fsdp2 -o none/out.py", 1, "create it first"),
    ("export none-found.json --to fsdp2", 1, "no plan"),
    # Running plans
    ("simulate plan.json", 0, "One step takes"),
    ("simulate plan.json --svg out.svg", 1, "this is one stage"),
    ("simulate plan.json --stage 3", 1, "stage"),
    ("simulate graph.pt2", 1, "this is an exported graph, not a plan"),
    ("simulate none-found.json", 1, "no plan to"),
    ("simulate plan.json -o none/trace.json", 1, "create it first"),
    ("profile none.json", 1, "there is no file none.json"),
    ("profile none-found.json", 1, "no plan to"),
    ("calibrate", 2, "--output"),
    ("calibrate -o made.json", 1, "--nproc"),
    ("calibrate -o none/made.json", 1, "create it first"),
    ("launch --plan none.json train.py", 1, "there is no file"),
    ("launch --plan graph.pt2 train.py", 1, "this is an exported graph, not a plan"),
    # Caches, keys, MASE, the service
    ("cache ls --cache cache", 0, "namespace"),
    ("cache ls --cache graph.pt2", 1, "graph.pt2"),
    ("cache ls plans --cache cache", 0, "key"),
    ("cache ls .. --cache cache", 1, "namespace"),
    ("cache show plans zz --cache cache", 1, "there is no intact entry 'zz'"),
    ("cache gc --cache cache", 1, "--max-bytes"),
    ("cache gc --max-bytes lots --cache cache", 1, "lots"),
    ("cache verify --cache cache", 0, "intact"),
    ("cache export none/x.tar --cache cache", 1, "create it first"),
    ("cache import none.tar --cache cache", 1, "there is no file none.tar"),
    ("cache import noise.bin --cache cache", 1, "noise.bin"),
    ("cache import folder --cache cache", 1, "folder is a folder"),
    ("cache ls --store nonsense", 1, "give a SQLAlchemy URL"),
    ("keys create me --scope all --store sqlite:///keys.db", 1, "all"),
    ("keys revoke none --store sqlite:///keys.db", 1, "no active key 'none'"),
    ("keys list --store nonsense", 1, "give a SQLAlchemy URL"),
    ("keys list --store sqlite:///graph.pt2/keys.db", 1, "graph.pt2"),
    ("mase pins none.pkl graph.pt2 --mesh 2", 1, "--trust-pickle"),
    ("mase pins none.pkl graph.pt2 --mesh 2 --trust-pickle", 1, "there is no file none.pkl"),
    ("mase pins noise.bin graph.pt2 --mesh 2 --trust-pickle", 1, "noise.bin"),
    ("serve --port 99999", 2, "99999"),
    ("serve --port -1", 2, "-1"),
    ("serve --port web", 2, "web"),
    ("serve --host no.such.host.invalid", 1, "cannot listen on no.such.host.invalid:8000"),
    ("serve --root-path plan", 1, "AUTOSHARD_ROOT_PATH='plan': "),
    ("serve --forwarded-allow-ips proxy", 1, "AUTOSHARD_FORWARDED_ALLOW_IPS='proxy': "),
    ("serve --tls-cert none.pem", 1, "cannot use none.pem: no such file"),
    ("serve --tls-cert noise.bin", 1, "cannot use noise.bin: "),
    ("serve --tls-key none.pem", 1, "needs --tls-cert"),
    ("serve --uds no/such/folder", 1, "No such file or directory; choose another --uds"),
    ("worker --port 99999", 2, "99999"),
    ("worker --workers 0", 2, "0"),
    ("worker --log-level loud", 2, "warning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph, plans of it, and files of other kinds."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, sizes in (("graph.pt2", (64, 512, 512, 512)), ("other.pt2", (64, 512, 512, 256))):
        model, kwargs = meta(mlp, *sizes)
        (folder / name).write_bytes(export_model(model, (), kwargs))
    for name, (content, _) in OTHERS.items():
        (folder / name).write_bytes(content)
    for name in ("folder", "folder.json"):
        (folder / name).mkdir()
    graph = folder / "graph.pt2"
    for name, options in (
        ("plan.json", ("--mesh", "2")),
        ("plan4.json", ("--mesh", "4")),
        ("sharded.json", ("--mesh", "2", "--pin", "parameter:up.weight=S(0)")),
        ("none-found.json", ("--mesh", "2", "--memory", "1MB")),
    ):
        autoshard("plan", graph, *options, "--no-cache", "-o", folder / name)
    (folder / "half.pt2").write_bytes(graph.read_bytes()[:2000])
    (folder / "half.json").write_bytes((folder / "plan.json").read_bytes()[:2000])
    (folder / "noise.json").write_bytes(b"\xff\xfe{")
    return folder


def test_there_are_enough_commands() -> None:
    assert len({line for line, _, _ in COMMANDS}) == len(COMMANDS) > 130


@pytest.mark.matrix
@pytest.mark.parametrize(("line", "code", "phrase"), COMMANDS)
def test_a_command_ends_with_a_status_and_a_message(
    line: str, code: int, phrase: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AUTOSHARD_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("WORLD_SIZE", "AUTOSHARD_SERVER"):
        monkeypatch.delenv(name, raising=False)
    result = autoshard(*line.split())
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())
    assert result.exit_code == code, shown
    assert result.exception is None or isinstance(result.exception, SystemExit), shown
    assert any(part in shown for part in phrase.split("|")), shown
    for raw in ("Traceback", "[Errno", "errno", "Error(", "0x7"):
        assert raw not in shown
    if code == 1:
        assert re.search(r"(error|wrong): \S", shown), shown
        for word in ("memory_budget", "time_limit", "PlanOptions", "num_devices", "make_mesh"):
            assert word not in shown
