"""Fine-tune with LoRA: PEFT wraps the model, the plan shards it, and adapters are saved whole.

Run it: torchrun --nproc-per-node 4 examples/lora_peft.py
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from autoshard import auto_parallelize, full_tensor
from autoshard.integrations.transformers import save_adapters

BATCH, LENGTH, STEPS = 8, 64, 5


def main() -> None:
    """Train adapters of a small Llama on random tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (4,))
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"])
    model = get_peft_model(LlamaForCausalLM(config), adapters).to(device)
    ids = torch.randint(config.vocab_size, (BATCH, LENGTH), device=device)

    batch = {"input_ids": ids, "labels": ids}
    model = auto_parallelize(model, (), batch, mesh=mesh, topology="h100-sxm")

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mesh.get_rank() == 0:
            print(f"step {step}: loss {full_tensor(loss).item():.4f}")
    with tempfile.TemporaryDirectory() as folder:
        save_adapters(model, folder)  # `PeftModel.from_pretrained(base, folder)` loads them
        if mesh.get_rank() == 0:
            print(sorted(path.name for path in Path(folder).iterdir()))


if __name__ == "__main__":
    main()
