"""The whole kernel on Verilator: against the model, at full rate, with faults."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, BitmapHeader, RowFormat, row_format
from nearflash.abi.config import expand_config
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import StreamError
from nearflash.abi.expand import ExpandCommand
from nearflash.abi.topk import StreamFault
from nearflash.device.expand import expand_command, expand_matrix
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.model.expand.bitmap import expand, read_rows
from nearflash.sim.device import VerilatorDevice
from nearflash.sim.kernel import MemoryModel

CONFIG = expand_config("expand-tiny")
FORMATS = [form for form in MATRIX_FORMATS if row_format(*form).name.lower() in CONFIG.formats]
FP16 = FORMATS[0]


@pytest.fixture(scope="module")
def device():
    with VerilatorDevice(CONFIG, memory_bytes=1 << 22) as opened:
        yield opened


@pytest.fixture(params=[0, 50], ids=["no stalls", "stalls"])
def stalled(device, request):
    device.kernel.configure(MemoryModel(stall_percent=request.param, seed=3))
    yield device
    device.kernel.configure(MemoryModel())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: row_format(*form).name)
def test_equals_the_model(stalled, form):
    """Rows that end in every kind of place, groups of one row and of all, densities from none to all."""
    rng = np.random.default_rng(1)
    for shape, group_rows in (((1, 1), 1), ((3, 70), 2), ((2, 512), 1), ((4, 513), 4), ((3, 1024), 2)):
        for density in (0.0, 0.4, 1.0):
            stream = random_matrix(rng, shape, density, form, group_rows)
            done = expand_matrix(stalled, stream)
            np.testing.assert_array_equal(done.dense, expand(stream))
            assert done.counters["elements_done"] == shape[0] * shape[1]
            assert done.counters["values_done"] == sum(row.present.sum() for row in read_rows(stream))
