import numpy as np
import pytest

from nearflash.abi.errors import CommandError, FormatError, NonFiniteError, ShapeError, UnknownDeviceError
from nearflash.inference.attend import attend
from nearflash.inference.policy.policy import AttentionPolicy

RNG = np.random.default_rng(1)
Q, K, V = RNG.standard_normal((4, 32)), *RNG.standard_normal((2, 2, 150, 32))


def exact(q, k, v, scaling):
    """In double precision, (heads, dim)."""
    q, k, v = (array.astype(np.float16).astype(np.float64) for array in (q, k, v))
    scores = np.einsum("hgd,hsd->hgs", q.reshape(len(k), -1, q.shape[1]), k) * scaling
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.einsum("hgs,hsd->hgd", weights / weights.sum(axis=2, keepdims=True), v).reshape(q.shape)


@pytest.mark.parametrize("options", [{}, {"device": "model"}, {"device": "model:attend-tiny", "scaling": 0.1}])
def test_dense_attention_of_grouped_queries(options):
    out = attend(Q, K, V, **options)
    assert out.shape == Q.shape and out.dtype == np.float32
    np.testing.assert_allclose(out, exact(Q, K, V, options.get("scaling", 32**-0.5)), atol=2e-3)


def test_all_of_a_sparse_policy_is_dense():
    everything = AttentionPolicy("sparf-page", score_dims=1.0, top_k=1.0, local_window=8)
    np.testing.assert_allclose(attend(Q, K, V, policy=everything, device="model"), attend(Q, K, V), atol=2e-3)


def test_pages_on_nand_give_the_same_bits_as_in_memory():
    in_memory = attend(Q, K, V, policy="sparf-page", device="model")
    assert (attend(Q, K, V, policy="sparf-page", device="model", nand_block_pages=64) == in_memory).all()


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ((Q, K[0], V[0]), ShapeError, r"k must have the shape \(kv_heads, tokens, dim\), .*, not \(150, 32\)"),
        ((Q, K[:, :0], V[:, :0]), ShapeError, r"each at least 1, not \(2, 0, 32\)"),
        ((Q, K, V[:, :-1]), ShapeError, r"v must have the shape of k, \(2, 150, 32\), not \(2, 149, 32\)"),
        ((Q[:3], K, V), ShapeError, r"q must have the shape \(a multiple of 2 heads, 32\), not \(3, 32\)"),
        ((Q[:, :16], K, V), ShapeError, r"not \(4, 16\)"),
        ((Q.astype(np.int32), K, V), FormatError, "q must be floating point, not int32"),
    ],
)
def test_arrays_that_do_not_fit_raise_named_errors(arrays, error, message):
    with pytest.raises(error, match=message):
        attend(*arrays)


def test_names_that_do_not_exist_list_what_does():
    with pytest.raises(CommandError, match=r"mode must be one of dense, .*, not 'flash'"):
        attend(Q, K, V, policy="flash")
    with pytest.raises(UnknownDeviceError, match=r"device must be one of bit, model, .*, not 'verilated'"):
        attend(Q, K, V, device="verilated")


@pytest.mark.parametrize(("place", "name"), [*enumerate("qkv")])
@pytest.mark.parametrize("value", [np.nan, 1e6])
def test_what_is_not_finite_raises(place, name, value):
    arrays = [Q.copy(), K.copy(), V.copy()]
    arrays[place].flat[5] = value
    with pytest.raises(NonFiniteError, match=f"{name} must be finite in fp16"):
        attend(*arrays)
