"""The store: what is appended is found again, whatever is freed, moved and erased around it."""

import numpy as np
import pytest


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("interleaved, lanes", [(True, (1, 1)), (False, (1, 1)), (True, (2, 2)), (False, (2, 2))])
def test_what_is_appended_comes_back(make_store, draw, stored, interleaved, lanes, background):
    k, v = draw(1, 333)
    with make_store(
        interleaved=interleaved, channels=lanes[0], units=lanes[1], background=background, buffer_bytes=1 << 16
    ) as store:
        sequence = store.add()
        for start, end in [(0, 200), (200, 201), (201, 250), *((t, t + 1) for t in range(250, 333))]:
            store.append(sequence, 1, k[:, start:end], v[:, start:end])
        found = stored(store, sequence, 1)
        assert np.array_equal(found[0], k) and np.array_equal(found[1], v)
        assert np.array_equal(store.layer(sequence, 1).v_mean, v.mean(axis=1, dtype=np.float64).astype(np.float32))
        assert store.lengths == {sequence: 0}
