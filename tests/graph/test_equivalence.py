"""Normalised graphs compute the same results as the model."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from autoshard.graph import Graph, InputKind

Check = Callable[..., Graph]

BATCH, SEQUENCE, VOCABULARY = 2, 8, 64


@pytest.fixture
def tokens() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            use_cache=False,
        )
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("make", "training"), [(gpt2, True), (gpt2, False), (bert, True), (llama, True), (t5, False)]
)
def test_transformer_gives_the_model_s_loss_and_gradients(
    make: Callable[[], nn.Module],
    training: bool,
    tokens: dict[str, torch.Tensor],
    check_equal: Check,
) -> None:
    torch.manual_seed(0)
    graph = check_equal(make().train(training), **tokens)
    operators = Counter(node.operator for node in graph.nodes)
    assert operators["aten.scaled_dot_product_attention.default"] > 0 or make is t5
    assert operators["aten.cross_entropy_loss.default"] == 1
    assert not {o for o in operators if o.split(".")[1].endswith("_") and "__" not in o}


@pytest.mark.parametrize(
    ("make", "kept", "aliases"),
    [
        (gpt2, "lm_head.weight", {"transformer.wte.weight"}),
        (t5, "lm_head.weight", {"shared.weight"}),
    ],
)
def test_tied_names_become_aliases(
    make: Callable[[], nn.Module],
    kept: str,
    aliases: set[str],
    tokens: dict[str, torch.Tensor],
    check_equal: Check,
) -> None:
    graph = check_equal(make(), **tokens)
    (tied,) = [i for i in graph.inputs if i.aliases]
    assert tied.target == kept
    assert aliases <= set(tied.aliases)
    assert all(graph.consumers[i.name] for i in graph.parameters)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)
        self.register_buffer("offset", torch.arange(4.0))
        self.captured = torch.full((4,), 0.5)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor | float]:
        hidden = torch.relu(self.up(x.flatten(0, 1)))
        y = self.down(hidden).unflatten(0, (-1, x.shape[1])) * scale
        return {"y": y + self.offset * self.captured, "scale": scale}


def test_mlp_with_buffer_constant_and_literal(check_equal: Check) -> None:
    graph = check_equal(Mlp(), x=torch.randn(3, 5, 8), scale=2.0)
    kinds = {i.target: i.kind for i in graph.inputs}
    assert kinds["up.weight"] is InputKind.PARAMETER
    assert kinds["offset"] is InputKind.BUFFER
    assert kinds["captured"] is InputKind.CONSTANT
    assert kinds["x"] is InputKind.USER
    assert kinds["scale"] is InputKind.LITERAL
    assert graph.outputs[1].name is None
    assert {node.operator for node in graph.nodes if "flatten" in node.name} == {
        "aten.reshape.default"
    }
    modules = {node.operator: node.module for node in graph.nodes}
    assert modules["aten.linear.default"] == "down"


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x))
        x += self.conv.bias[:, None, None]
        return nn.functional.cross_entropy(self.head(self.act(x).mean((-1, -2))), labels)


def test_batch_norm_counter_is_updated(check_equal: Check) -> None:
    labels = torch.tensor([0, 4])
    graph = check_equal(ConvNet().train(), x=torch.randn(2, 3, 6, 6), labels=labels)
    counter = next(i for i in graph.inputs if i.target == "norm.num_batches_tracked")
    assert graph.updated == {counter.name: 1}
    assert graph.num_results == 1


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.first(x)
        with torch.no_grad():
            scale = self.second(h).sigmoid()
            unit = torch.ones_like(h)
        return h * scale + h.detach() * unit, scale


def test_no_gradient_flows_out_of_a_no_grad_region(check_equal: Check) -> None:
    graph = check_equal(NoGrad(), x=torch.randn(4, 8))
    result, scale = (graph.values[o.name] for o in graph.outputs if o.name)
    assert result.requires_grad
    assert not scale.requires_grad


class Loss(nn.Module):
    def __init__(self, *, weight: torch.Tensor | None = None, **options: object) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)
        self.register_buffer("weight", weight)
        self.options = options

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, labels, weight=self.weight, **self.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_mean_loss_is_a_sum_over_a_count(dtype: torch.dtype, check_equal: Check) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 8, dtype=dtype)
    labels = torch.randint(0, 6, (32,))
    labels[::3] = 5
    graph = check_equal(Loss(ignore_index=5).to(dtype), x=x, labels=labels)
    (loss,) = [n for n in graph.nodes if n.operator == "aten.cross_entropy_loss.default"]
    half = dtype in {torch.float16, torch.bfloat16}
    assert loss.argument("reduction") == (0 if half else 2)
    assert sum(n.operator == "aten.div.Tensor" for n in graph.nodes) == 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, torch.arange(6.0)])
def test_mean_loss_with_weights_and_smoothing_is_one_too(
    smoothing: float, weight: torch.Tensor | None, check_equal: Check
) -> None:
    labels = torch.tensor([0, 1, 5, -100])
    module = Loss(weight=weight, label_smoothing=smoothing)
    graph = check_equal(module, x=torch.randn(4, 8), labels=labels)
    (loss,) = [n for n in graph.nodes if n.operator == "aten.cross_entropy_loss.default"]
    assert loss.argument("reduction") == 2


def test_summed_losses_stay_as_they_are(check_equal: Check) -> None:
    labels = torch.tensor([0, 1, 5, -100])
    graph = check_equal(Loss(reduction="sum"), x=torch.randn(4, 8), labels=labels)
    assert not any(n.operator == "aten.div.Tensor" for n in graph.nodes)


def test_probabilities_as_labels_stay_as_they_are(check_equal: Check) -> None:
    labels = torch.rand(4, 6).softmax(-1)
    graph = check_equal(Loss(), x=torch.randn(4, 8), labels=labels)
    assert not any(n.operator == "aten.div.Tensor" for n in graph.nodes)


class Outputs(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        values, order = x.sort(-1, descending=True)
        first, *_, last = x.chunk(3, dim=-1)
        return [values, order, first + last[..., -1:], *x.unbind(-2)[:2], x.t(), x.mean()]


def test_several_outputs_and_list_outputs(check_equal: Check) -> None:
    graph = check_equal(Outputs(), x=torch.randn(4, 6))
    arguments = {key for node in graph.nodes for key, _ in node.arguments}
    assert {"dim", "start"} <= arguments
    for node in graph.nodes:
        for key in ("dim", "index", "start", "end"):
            value = node.argument(key, 0)
            assert isinstance(value, int)
            assert value >= 0


class Regression(nn.Module):
    """A loss that broadcasts its arguments, to shapes that they have and to new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide, _ = torch.broadcast_tensors(self.linear.bias, x)
        return nn.functional.mse_loss(self.linear(x), y) + (wide * x).sum()


def test_broadcasts_are_expansions(check_equal: Check) -> None:
    torch.manual_seed(0)
    graph = check_equal(Regression(), x=torch.randn(3, 4), y=torch.randn(3, 4))
    operators = Counter(node.operator for node in graph.nodes)
    assert operators["aten.expand.default"] == 1
    assert not operators["aten.broadcast_tensors.default"]


class OtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.outer(x, self.weight).repeat_interleave(2, 1, output_size=6)
        return torch.concat([grid, torch.outer(x, x[:2])], -1).square().sum()


def test_operators_have_one_name(check_equal: Check) -> None:
    graph = check_equal(OtherNames(), x=torch.randn(4))
    names = Counter(node.operator for node in graph.nodes)
    assert names["aten.einsum.default"] == 2
    (repeat,) = (n for n in graph.nodes if n.operator == "aten.repeat_interleave.self_int")
    assert [key for key, _ in repeat.arguments] == ["self", "repeats", "dim"]
    assert names["aten.cat.default"] == 1
