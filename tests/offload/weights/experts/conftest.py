"""Models with experts in folders of their own, and a policy that reads them from disk."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.offload import OffloadedModel
from nearflash.planning.policy import OffloadPolicy, Shares

DISK, HOST, GPU = Shares(disk=1), Shares(host=1), Shares(gpu=1)


@pytest.fixture
def mixture(saved, tmp_path):
    """Makes a family's model in a folder of its own."""

    def make(family, **changes):
        _, model = saved(family, **changes)
        folder = tmp_path / family
        model.save_pretrained(folder)
        return folder, model

    return make


@pytest.fixture(scope="session")
def policy():
    """Makes a policy with all layers on disk."""

    def make(batch_size=3, num_batches=2, **options):
        return OffloadPolicy(batch_size, num_batches, DISK, HOST, GPU, **options)

    return make


@pytest.fixture(scope="session")
def expert_buffer(policy):
    """Finds the bytes of one expert as a buffer holds it."""

    def size_bytes(folder):
        with pytest.raises(CommandError, match="for two experts") as refused:
            OffloadedModel(folder, policy(), expert_bytes=1)
        return int(str(refused.value).split("must be ")[1].split()[0]) // 2

    return size_bytes
