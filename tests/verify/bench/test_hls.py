"""Rows of the HLS bench, in small: every kernel's, and a difference that is counted."""

import numpy as np
import pytest

from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import LionStep
from nearflash.device.backends.model.update import ModelDevice
from nearflash.verify.bench import hls

CONFIG = update_config("update-tiny")


@pytest.fixture
def one_rule(monkeypatch):
    monkeypatch.setattr(hls, "rules", lambda: [LionStep(1e-3, 2, weight_decay=0.1)])


@pytest.mark.full
def test_rows_of_updates_and_expanders_differ_nowhere(one_rule):
    rows = list(hls.run(params=5000, config="update-tiny"))
    names = ["lion", "lion", "expand_topk fp32", "expand_topk fp16", "expand_topk bf16", "expand_bitmap"]
    assert [row["kernel"] for row in rows] == names
    assert [row["scalar"] for row in rows[:2]] == ["float", "Fp32"]
    assert all(row["mismatches"] == 0 and row["seconds"] > 0 and row["words"] >= 5000 for row in rows)


class OtherModel(ModelDevice):
    """A model with one bit of its first output word wrong."""

    def _start(self, command):
        super()._start(command)
        address, _ = command.writes()["p"]
        self.memory.view(address, 4)[0] ^= np.uint8(1)


def test_a_difference_is_counted(monkeypatch, one_rule):
    monkeypatch.setattr(hls, "ModelDevice", OtherModel)
    assert next(hls.run(params=100, config="update-tiny"))["mismatches"] == 1
