import pytest

from nearflash.abi.errors import CommandError
from nearflash.planning.policy import OffloadPolicy, Shares


def test_shares_sum_to_one():
    assert Shares(gpu=0.2, host=0.8).disk == 0
    assert Shares(0.1, 0.2, 0.3, 0.4).device == 0.4


@pytest.mark.parametrize("shares", [(0.5,), (1.2, -0.2), (0.5, 0.6), (float("nan"), 1.0)])
def test_other_shares_are_rejected(shares):
    with pytest.raises(CommandError, match="sum to 1"):
        Shares(*shares)


def _policy(**changes):
    settings = {"weights": Shares(gpu=1), "cache": Shares(host=1), "activations": Shares(gpu=1)}
    return OffloadPolicy(**{"batch_size": 4, "num_batches": 3, **settings, **changes})


def test_a_block_is_all_batches():
    assert _policy().block_size == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "1 at least"),
        ({"num_batches": -1}, "1 at least"),
        ({"weight_bits": 3}, "16 or 4"),
        ({"cache_bits": 8}, "16 or 4"),
        ({"weights": Shares(device=1)}, "only the KV cache"),
        ({"stored_fraction": 0.0}, "above 0 and 1 at most, not 0.0"),
        ({"stored_fraction": 1.5}, "above 0 and 1 at most, not 1.5"),
        ({"crossing_fraction": 1.5}, "crossing_fraction must be between 0 and 1, not 1.5"),
        ({"read_fraction": 0.0}, "read_fraction must be above 0 and 1 at most, not 0.0"),
    ],
)
def test_policies_that_mean_nothing_are_rejected(changes, message):
    with pytest.raises(CommandError, match=message):
        _policy(**changes)
