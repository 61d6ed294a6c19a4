"""Train GPT-2 with a loop of your own; the mesh and one call are added to a program for one device.

Run it on 4 GPUs, or on 4 processes without: torchrun --nproc-per-node 4 examples/train_gpt2.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from autoshard import auto_parallelize, full_tensor

BATCH, LENGTH, STEPS = 8, 64, 5


def main() -> None:
    """Train a small GPT-2 on random tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (2, 2))
    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=4, n_positions=LENGTH, vocab_size=512,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(device)
    ids = torch.randint(config.vocab_size, (BATCH, LENGTH), device=device)

    # The example batch is the global one. Leave the topology out to plan for your own devices.
    batch = {"input_ids": ids, "labels": ids}
    model = auto_parallelize(model, (), batch, mesh=mesh, topology="h100-sxm")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {full_tensor(loss).item():.4f}")


if __name__ == "__main__":
    main()
