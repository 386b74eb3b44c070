import pytest

from nearflash.sim.verilator.kernel import MemoryModel


@pytest.fixture(params=[0, 50], ids=["no stalls", "stalls"])
def stalled(device, request):
    """The module's `device`, with memory that never stalls, and with one that does half of the time."""
    device.kernel.configure(MemoryModel(stall_percent=request.param, seed=3))
    yield device
    device.kernel.configure(MemoryModel())
