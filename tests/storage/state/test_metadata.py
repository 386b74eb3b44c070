"""Values beside the arrays come back equal and of their own kind, or are rejected with a named error."""

import math
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from nearflash.abi.errors import FormatError, StateError
from nearflash.storage import StateStore
from nearflash.storage.state.metadata import METADATA_BYTES, TAG, decode_metadata, encode_metadata

VALUES = [
    {2: 1, 4: 1},
    {1: "a", "1": "b", None: "c", (1, 2): "d", 2.5: "e"},
    Counter({2: 1, 4: 3}),
    (1, (2, [3, ()])),
    {1, "a", (2,)},
    frozenset({b"x"}),
    deque([1, 2], maxlen=5),
    b"\x00\xff",
    "\ud800 \u2028",
    2**300,
    -(2**63),
    float("inf"),
    float("-inf"),
    -0.0,
    5e-324,
    1e308,
    True,
    None,
    {TAG: ["tuple", [1]]},
    {"nested": {TAG: 3}},
    OrderedDict(b=1, a=2),
    np.float32(0.1),
    np.int64(-3),
    np.bool_(True),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.zeros((0, 3), np.float16),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_come_back_equal(value):
    found = decode_metadata(encode_metadata({"value": value}))["value"]
    wanted = dict(value) if isinstance(value, OrderedDict) else value
    assert type(found) is type(wanted) and repr(found) == repr(wanted)
    assert bool(np.all(found == wanted))


def test_nan_and_signed_zero_come_back(tmp_path, small):
    """Through a file: JSON had refused the first."""
    with small.create([tmp_path / "state"]) as store:
        small.write_step(store)
        store.commit((1, 1, 1), {"loss": float("nan"), "zero": -0.0, 7: {8: (9,)}})
    with StateStore.open(tmp_path / "state") as store:
        found = store.metadata
        assert math.isnan(found.pop("loss")) and math.copysign(1, found["zero"]) == -1
        assert found == {"zero": -0.0, 7: {8: (9,)}}


def circle():
    one = []
    one.append(one)
    return one


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.ones(2), "metadata\\['x'\\] must be a plain value, not a Tensor: give a tensor as tensor.numpy"),
        (object(), "must be a plain value, not a object"),
        (1j, "must be a plain value, not a complex"),
        (np.array([object()]), "must be a plain value, not a ndarray"),
        ({"y": [lambda: 0]}, "metadata\\['x'\\]\\['y'\\]\\[0\\] must be a plain value"),
        (10**5000, "must be values that JSON can have"),
        ("y" * METADATA_BYTES, "must fit 65536 bytes"),
        (circle(), "at most 100 values deep, without circles"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_come_back_is_refused(value, message):
    with pytest.raises(FormatError, match=message):
        encode_metadata({"x": value})
    with pytest.raises(FormatError, match="must be a dict"):
        encode_metadata([1])


@pytest.mark.parametrize("body", [{TAG: ["list", []]}, {TAG: 3}, {"a": {TAG: ["dict", [1]]}}, {TAG: ["tuple", [1]]}])
def test_forged_tags_are_refused(body):
    with pytest.raises(StateError, match="metadata of a state must be"):
        decode_metadata(body)
