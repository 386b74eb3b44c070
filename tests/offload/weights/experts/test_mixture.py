"""The mixtures of a model: experts that it has not, routers, sources of single experts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, WeightsError
from nearflash.offload import OffloadedModel
from nearflash.offload.tiers.link import host_memory
from nearflash.offload.weights.experts.mixture import add_row_checksums, expert_source
from nearflash.offload.weights.layout import BufferLayout, LayoutReader
from nearflash.verify.fixtures.files import rot
from nearflash.weights import PackedTensor, read_file, write_file
from nearflash.weights.sources import Source, SourcePiece


def test_a_model_without_experts(saved, policy):
    folder, _ = saved("llama")
    with pytest.raises(CommandError, match="without experts"):
        OffloadedModel(folder, policy(), expert_bytes=1 << 20)


def test_routers_stay_in_memory(mixture, policy):
    folder, plain_model = mixture("mixtral")
    with OffloadedModel(folder, policy(), expert_bytes=1 << 20) as model:
        for number, layer in enumerate(model.skeleton.layers):
            weight = layer.mlp.gate.weight
            assert torch.equal(weight, plain_model.model.layers[number].mlp.gate.weight)
            assert layer.self_attn.q_proj.weight.is_meta


@pytest.mark.parametrize("version", [2, 1])
def test_a_damaged_expert_of_a_fused_parameter_is_reported(tmp_path, version):
    """Only the whole parameter had a checksum: damage passed, and another expert's bytes."""
    values = torch.randn(8, 64, 64)
    data = values.numpy().view(np.uint8).reshape(-1)
    write_file(tmp_path / "file", {"e": ("F32", (8, 64, 64))}, [PackedTensor("e", "F32", (8, 64, 64), "dense", data)])
    tensor = read_file(tmp_path / "file")["e"]
    assert len(tensor.row_checksums) == 8
    tensor = tensor if version == 2 else replace(tensor, row_checksums=())
    source = add_row_checksums(Source("e", tensor.shape, torch.float32, (SourcePiece(tensor),)))
    rot(tmp_path / "file", data[-tensor.stored_bytes // 8 :].tobytes(), tensor.offset + 3 * tensor.stored_bytes // 8)
    reader, memory = LayoutReader(), host_memory(1 << 16)
    for expert in range(8):
        layout = BufferLayout({"e": expert_source(source, expert)}, gap_bytes=0)
        if expert != 3:
            reader.read_runs(layout, memory)
            assert torch.equal(layout.views(memory)["e"], values[expert])
            continue
        with pytest.raises(WeightsError, match=r"tensor 'e', .* it is damaged: its checksum is another"):
            reader.read_runs(layout, memory)
    reader.close()
    if version == 1:
        with pytest.raises(WeightsError, match=r"tensor 'e', .* it is damaged: its checksum is another"):
            add_row_checksums(Source("e", tensor.shape, torch.float32, (SourcePiece(tensor),)))
