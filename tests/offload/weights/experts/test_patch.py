"""Cached experts in the place of a model's parameters."""

import torch

from nearflash.offload import OffloadedModel


def test_parameters_are_put_back(mixture, prompts, policy):
    folder, _ = mixture("qwen3_moe")
    model = OffloadedModel(folder, policy(), expert_bytes=1 << 20)
    module = model.skeleton.layers[0].mlp.experts
    assert "gate_up_proj" not in module._parameters and not isinstance(module.gate_up_proj, torch.Tensor)
    model.close()
    model.close()
    assert isinstance(module.gate_up_proj, torch.nn.Parameter) and module.gate_up_proj.is_meta
    assert "forward" not in vars(module)
    assert not any(model.ledger.held[tier] for tier in ("host", "disk") if tier in model.ledger.held)
