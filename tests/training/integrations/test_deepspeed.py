"""DeepSpeed's configuration: what it means here, what it does not, and that nothing is passed over in silence."""

import copy
import json

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.training import LossScale, NearStorageAdam, NearStorageAdamW, NearStorageSGD
from nearflash.training.integrations.deepspeed import from_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "pin_memory": True},
    },
    "aio": {"block_size": 1048576, "queue_depth": 8},
}


def changed(*keys, value):
    config = copy.deepcopy(CONFIG)
    block = config
    for key in keys[:-1]:
        block = block.setdefault(key, {})
    block[keys[-1]] = value
    return config


def test_a_whole_configuration(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for config in (CONFIG, tmp_path / "ds.json", str(tmp_path / "ds.json")):
        chosen = from_deepspeed(config)
        assert chosen.optimizer is NearStorageAdamW
        assert chosen.options == {
            "lr": 1e-4, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1, "max_grad_norm": 0.5,
            "param_dtype": "bf16", "path": "/nvme",
        }  # fmt: skip
        assert set(chosen.without_effect) == {
            "train_micro_batch_size_per_gpu", "zero_optimization.stage", "zero_optimization.sub_group_size",
            "zero_optimization.offload_optimizer.buffer_count", "zero_optimization.offload_optimizer.pin_memory",
            "aio.block_size", "aio.queue_depth",
        }  # fmt: skip


def test_other_optimizers():
    coupled = from_deepspeed(changed("optimizer", value={"type": "Adam", "params": {"adam_w_mode": False}}))
    assert coupled.optimizer is NearStorageAdam
    assert from_deepspeed(changed("optimizer", value={"type": "Adam"})).optimizer is NearStorageAdamW
    sgd = from_deepspeed(changed("optimizer", value={"type": "SGD", "params": {"momentum": 0.9}}))
    assert sgd.optimizer is NearStorageSGD and sgd.options["momentum"] == 0.9


def test_loss_scales():
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 500, "hysteresis": 3}
    options = from_deepspeed(changed("bf16", value={"enabled": False}) | {"fp16": fp16}).options
    assert options["param_dtype"] == "fp16" and options["loss_scale"] == LossScale(1024.0, window=500, hysteresis=3)
    fixed = from_deepspeed(changed("bf16", value={}) | {"fp16": {"enabled": True, "loss_scale": 128}})
    assert fixed.options["loss_scale"] == 128.0
    assert "loss_scale" not in from_deepspeed(CONFIG).options


@pytest.mark.parametrize(
    "config, message",
    [
        (changed("optimiser", value={}), "known here, not optimiser;"),
        (changed("optimizer", "params", "beta3", value=1), "not optimizer.params.beta3;"),
        (changed("aio", "gds", value=True) | {"scheduler": {}}, "not scheduler, aio.gds;"),
        (changed("optimizer", "type", value="OneBitAdam"), "optimizer.type must be one of adam, .*, not 'OneBitAdam'"),
        (changed("optimizer", "params", "lr", value="auto"), "optimizer.params.lr must be a value, not 'auto'"),
        (changed("zero_optimization", value={}), "must have the device 'nvme' and an nvme_path, not 'none' and None"),
        (changed("zero_optimization", "offload_optimizer", "ratio", value=0.5), "ratio must be 1, not 0.5"),
        (changed("fp16", value={"enabled": True}), "one of fp16 and bf16 must be enabled, not both"),
        (changed("fp16", value={"min_loss_scale": 4}), "min_loss_scale must be 1, not 4"),
        (changed("fp16", value={"auto_cast": True}), "fp16.auto_cast must be false"),
        (changed("aio", value=3), "aio must be a block of keys, not 3"),
        ("/no/such.json", "must be a readable JSON file, not '/no/such.json'"),
    ],
)
def test_what_cannot_be_done_is_named(config, message):
    with pytest.raises(CommandError, match=message):
        from_deepspeed(config)


def test_it_trains(tmp_path):
    tensor = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    chosen = from_deepspeed(changed("zero_optimization", "offload_optimizer", "nvme_path", value=str(tmp_path)))
    with chosen.optimizer([tensor], **chosen.options) as optimizer:
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        assert (
            optimizer.steps == 1
            and optimizer.report.grad_norm == 10
            and optimizer.store.path == tmp_path / "optimizer.state"
        )
