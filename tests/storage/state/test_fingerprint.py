import numpy as np
import pytest
import torch

from nearflash.storage.state.fingerprint import RUN, fingerprint_bytes
from nearflash.training.step.fingerprint import fingerprint


@pytest.mark.parametrize("count", [0, 1, 2, 4 * RUN + 3, 2100 * RUN + 5])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_the_same_as_of_a_tensor(count, dtype):
    info = torch.iinfo(dtype)
    values = torch.randint(info.min, info.max, (count,), dtype=dtype, generator=torch.Generator().manual_seed(count))
    assert fingerprint_bytes(values.numpy().view(np.uint8)) == (fingerprint(values) if count else 0)
