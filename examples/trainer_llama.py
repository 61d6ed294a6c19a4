"""Train Llama with the Trainer of transformers: the plan takes the place of its FSDP settings.

Run it: torchrun --nproc-per-node 4 examples/trainer_llama.py
"""

import tempfile

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autoshard import auto_parallelize
from autoshard.integrations.transformers import PlannedTrainer

BATCH, LENGTH = 8, 64


def main() -> None:
    """Train a small Llama on random tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (2, 2))
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (4 * BATCH, LENGTH))]

    # The Trainer divides the loss by the number of labels, which is an argument of forward.
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(1.0)}
    model = auto_parallelize(model.to(device), (), batch, mesh=mesh, topology="h100-sxm")

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,  # the global batch: all ranks run one copy
            max_steps=5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = PlannedTrainer(model, arguments, train_dataset=texts)
        trainer.train()


if __name__ == "__main__":
    main()
