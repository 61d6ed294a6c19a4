"""Train a mixture of experts: the plan finds expert parallelism, here asked for by a pin.

Run it: torchrun --nproc-per-node 4 examples/mixture_of_experts.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

from autoshard import Pins, auto_parallelize, full_tensor

BATCH, LENGTH, STEPS = 8, 64, 5


def main() -> None:
    """Train a small Mixtral on random tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (4,))
    config = MixtralConfig(
        num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=4, vocab_size=512,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to(device)
    ids = torch.randint(config.vocab_size, (BATCH, LENGTH), device=device)

    batch = {"input_ids": ids, "labels": ids}
    # Dim 0 of these weights are the experts. Without the pin the plan has what is fastest.
    pins = Pins(parameters={"*.experts.*": "S(0)"})
    model = auto_parallelize(model, (), batch, mesh=mesh, topology="h100-sxm", pins=pins)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {full_tensor(loss).item():.4f}")


if __name__ == "__main__":
    main()
