"""A Llama of 1.5 billion parameters within 8 GB: `python -m nearflash.training.examples.large FOLDER [--torch]`.

FOLDER needs 22 GB; torch.optim.AdamW (--torch) needs 12 GB of memory. A limit: systemd-run with MemoryMax=8G and
MemorySwapMax=0, or with cgroups of version 1 memory.limit_in_bytes of a group that has the shell in its cgroup.procs.
"""

import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearflash.support.process import peak_resident_bytes
from nearflash.training import NearStorageAdamW
from nearflash.training.blocks import stream_blocks

SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL: dict[str, Any] = {"state_format": "mx8", "overlap": "backward", "free_gradients": True, "max_grad_norm": 1.0}

if __name__ == "__main__":
    config = LlamaConfig(**SHAPE, num_hidden_layers=32, tie_word_embeddings=True, use_cache=False)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    print(f"{model.num_parameters() / 1e9:.2f} billion parameters", flush=True)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if sys.argv[2:] != ["--torch"]:
        optimizer = NearStorageAdamW(model.parameters(), lr=1e-4, path=sys.argv[1], **SMALL)
        stream_blocks(model, optimizer)
    ids = torch.randint(config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
    for step in range(4):
        times = [time.perf_counter()]
        loss = model(input_ids=ids, labels=ids).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        parts = [f"{name} {times[i + 1] - times[i]:.1f} s" for i, name in enumerate(("forward", "backward", "step"))]
        print(step, f"loss {loss:.3f}", *parts, f"peak {peak_resident_bytes() / 1e9:.2f} GB", sep=", ", flush=True)
