"""Generate text with a key-value cache that the plan shards: one plan for prompts, one for tokens.

Run it: torchrun --nproc-per-node 4 examples/generate_kv_cache.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

from autoshard import PlanOptions, export_model, load_graph, make_mesh, make_plan, parallelize
from autoshard.integrations.generation import PlannedGenerator

ROWS, PROMPT, CAPACITY = 2, 16, 64


def main() -> None:
    """Continue two random prompts with a small Llama."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    device_mesh = init_device_mesh(device, (4,), mesh_dim_names=("device",))
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=CAPACITY,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.cache_implementation = "static"
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    cached = TorchExportableModuleWithStaticCache(model, batch_size=ROWS, max_cache_len=CAPACITY)

    mesh = make_mesh((4,), axes=("device",), topology="h100-sxm")
    ids = torch.randint(config.vocab_size, (ROWS, PROMPT))
    token = {"input_ids": ids[:, :1], "cache_position": torch.arange(1)}
    prompt = {"input_ids": ids, "cache_position": torch.arange(PROMPT)}
    graph = load_graph(export_model(cached, (), token))
    decode = make_plan(graph, mesh, PlanOptions(mode="inference"))
    # Both plans must store parameters and cache alike.
    options = PlanOptions(mode="inference", pins=decode.state_pins())
    prefill = make_plan(load_graph(export_model(cached, (), prompt)), mesh, options)

    plans = {"decode": decode, "prefill": prefill}
    generator = PlannedGenerator(parallelize(cached.to(device), plans, device_mesh))
    tokens = generator.generate(ids.to(device), max_new_tokens=8, do_sample=False)
    if device_mesh.get_rank() == 0:
        print(tokens[:, PROMPT:].tolist())


if __name__ == "__main__":
    main()
