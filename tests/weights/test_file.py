import json
from math import prod

import numpy as np
import pytest
from safetensors import safe_open

from nearflash.abi.errors import CommandError, FormatError, ShapeError, StateError, WeightsError
from nearflash.storage.state.safetensors import checked_header
from nearflash.weights import compress_tensor, expand, open_checkpoint, read_file, write_file
from nearflash.weights.checkpoint import write_index
from nearflash.weights.compress import dense_tensor, folded_shape

RNG = np.random.default_rng(1)


def pruned(shape, dtype=np.float16):
    values = RNG.normal(0, 0.02, shape).astype(np.float32)
    values[np.abs(values) < 0.0135] = 0
    return values.astype(np.float16) if dtype is np.float16 else (values.view(np.uint32) >> 16).astype(np.uint16)


TENSORS = {
    "up": pruned((96, 576)),
    "down": pruned((33, 700), np.uint16),
    "dense": RNG.normal(size=(48, 64)).astype(np.float16),
    "experts": pruned((4, 32, 128)),
}


def planned_of(packed):
    return {each.name: (each.dtype, each.shape) for each in packed}


@pytest.fixture
def file(tmp_path):
    packed = [compress_tensor(name, values) for name, values in TENSORS.items()]
    norm = RNG.normal(size=5).astype(np.float32)
    packed.append(dense_tensor("norm", "F32", (5,), norm.view(np.uint8)))
    write_file(tmp_path / "model.safetensors", planned_of(packed), packed, {"method": "magnitude"})
    return tmp_path / "model.safetensors"


def test_tensors_come_back_to_the_bit(file):
    tensors = read_file(file)
    assert [tensor.form for tensor in tensors.values()] == ["bitmap", "bitmap", "dense", "bitmap", "dense"]
    for name, values in TENSORS.items():
        found = expand(tensors[name])
        assert found.dtype == values.dtype and found.shape == values.shape and found.tobytes() == values.tobytes()
    assert expand(tensors["norm"]).dtype == np.float32


def test_the_file_is_safetensors_for_other_readers(file):
    with safe_open(str(file), "numpy") as other:
        assert other.metadata()["method"] == "magnitude" and other.metadata()["nearflash_weights"] == "1"
        assert other.get_tensor("up").dtype == np.uint8
        assert (other.get_tensor("dense") == TENSORS["dense"]).all()
    assert file.stat().st_mode & 0o777 == 0o600
    assert all(tensor.offset % 64 == 0 for tensor in read_file(file).values())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", TENSORS)
def test_quantised_tensors_are_near_and_the_smaller_form_wins(tmp_path, name, bits):
    packed = compress_tensor(name, TENSORS[name], bits=bits)
    assert packed.form == (f"int{bits}" if name == "dense" else "bitmap")
    write_file(tmp_path / "file", planned_of([packed]), [packed])
    found, values = expand(read_file(tmp_path / "file")[name]), TENSORS[name]
    if values.dtype == np.uint16:
        found, values = ((each.astype(np.uint32) << 16).view(np.float32) for each in (found, values))
    span = values.astype(np.float32).max() - values.astype(np.float32).min()
    assert np.abs(found.astype(np.float32) - values).max() < span / (2**bits - 1)


def test_codes_without_a_bitmap_take_nine_sixteenths_or_less():
    values = TENSORS["up"]
    sizes = {bits: len(compress_tensor("up", values, "groups", bits).data) / values.nbytes for bits in (8, 4)}
    assert sizes == {8: 0.53125, 4: 0.28125}


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_codes_without_a_bitmap_equal_those_with_one(tmp_path, columns, bits, dtype):
    values = RNG.normal(size=(3, columns)).astype(np.float16).view(dtype)
    from nearflash.weights import pack, quantize

    packed = compress_tensor("x", values, "groups", bits)
    write_file(tmp_path / "file", planned_of([packed]), [packed])
    whole = quantize(values, bits, present=np.ones(values.shape, bool))
    assert (expand(read_file(tmp_path / "file")["x"]) == expand(pack(whole))).all()


def test_what_no_form_makes_smaller_stays_dense():
    values = RNG.integers(0, 1 << 16, (64, 64)).astype(np.uint16)
    assert compress_tensor("random", values).form == "dense"


@pytest.mark.parametrize(("rows", "columns", "step", "expected"), [
    (96, 576, 1, (4, 13824)), (33, 700, 64, (33, 700)), (7, 100, 1, (1, 700)), (211, 200, 1, (211, 200)),
    (4, 40000, 1, (4, 40000)), (9216, 9216, 64, (9216, 9216)),
])  # fmt: skip
def test_rows_are_joined_as_long_as_they_stay_short(rows, columns, step, expected):
    found = folded_shape(rows, columns, step)
    assert prod(found) == rows * columns and found[1] <= max(16384, columns)
    assert found == expected


def test_writing_into_memory_of_the_callers(file):
    torch = pytest.importorskip("torch")
    tensors = read_file(file)
    array = np.empty((96, 576), np.float16)
    assert expand(tensors["up"], out=array) is array and (array == TENSORS["up"]).all()
    tensor = torch.empty(33, 700, dtype=torch.bfloat16)
    assert expand(tensors["down"], out=tensor) is tensor
    assert (tensor.view(torch.int16).numpy().view(np.uint16) == TENSORS["down"]).all()
    half = torch.empty(48, 64, dtype=torch.float16)
    assert (expand(tensors["dense"], out=half).numpy() == TENSORS["dense"]).all()
    with pytest.raises(FormatError, match="out must be of bfloat16 or uint16, not float16"):
        expand(tensors["down"], out=torch.empty(33, 700, dtype=torch.float16))
    with pytest.raises(ShapeError, match=r"out must have the shape \(96, 576\), not \(576, 96\)"):
        expand(tensors["up"], out=np.empty((576, 96), np.float16))
    with pytest.raises(ShapeError, match="out must be contiguous"):
        expand(tensors["up"], out=np.empty((576, 96), np.float16).T)


@pytest.mark.parametrize("device", ["host", "model"])
def test_devices_give_the_same_bits(file, device):
    tensors = read_file(file)
    for name in ("up", "down", "experts"):
        assert expand(tensors[name], device=device).tobytes() == TENSORS[name].tobytes()


def header_and_data(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path, header, data):
    text = checked_header(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("name", ["up", "down", "dense", "experts", "norm"])
def test_a_changed_byte_is_named_with_tensor_and_offset(file, name):
    tensor = read_file(file)[name]
    data = bytearray(file.read_bytes())
    data[tensor.offset + tensor.stored_bytes // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(WeightsError, match=f"tensor '{name}', at byte {tensor.offset}: "):
        expand(read_file(file)[name])


@pytest.mark.parametrize("kept", [0, 5, 100, 2000, -64, -1])
def test_a_file_cut_short(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match="must be a safetensors file"):
        read_file(file)


def test_a_file_cut_after_it_was_opened(file):
    tensors = read_file(file)
    file.write_bytes(file.read_bytes()[: tensors["dense"].offset + 100])
    with pytest.raises(WeightsError, match=r"tensor 'dense', at byte .*: the file ends .* bytes too early"):
        expand(tensors["dense"])
    file.unlink()
    with pytest.raises(WeightsError, match=r"tensor 'up', .*: reading failed .No such file"):
        expand(tensors["up"])


def test_a_newer_version(file):
    header, data = header_and_data(file)
    header["__metadata__"]["nearflash_weights"] = "2"
    rewrite(file, header, data)
    with pytest.raises(WeightsError, match="must be of version 1, not 2: use a newer nearflash"):
        read_file(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [96, 577]}, r"tensor 'up', .*must be of F16 and the shape \(96, 577\), .*, not 4 x 13824 of FP16"),
        ({"dtype": "BF16"}, "tensor 'up', .*must be of BF16 and .*, not 4 x 13824 of FP16"),
        ({"dtype": "F32"}, "its metadata must describe its compressed tensors .'up' is stored as U8"),
        ({"form": "zip"}, "its metadata must describe"),
        ({"shape": [0]}, "its metadata must describe"),
        ({"shape": "big"}, "its metadata must describe"),
        ({"shape": []}, "its metadata must describe"),
        ({"shape": [1 << 33, 200]}, r"'up' has .* bytes, too few for the shape \[8589934592, 200\]"),
        ({"shape": [1 << 70, 1]}, "too few for the shape"),
        ({"form": "int8"}, "tensor 'up', .* int8 codes must have"),
    ],
)
def test_metadata_that_states_another_tensor(file, change, message):
    header, data = header_and_data(file)
    described = json.loads(header["__metadata__"]["nearflash_tensors"])
    described["up"].update(change)
    header["__metadata__"]["nearflash_tensors"] = json.dumps(described)
    rewrite(file, header, data)
    with pytest.raises(WeightsError, match=message):
        expand(read_file(file)["up"])


def test_metadata_of_a_tensor_that_is_not_there(file):
    header, data = header_and_data(file)
    described = json.loads(header["__metadata__"]["nearflash_tensors"])
    header["__metadata__"]["nearflash_tensors"] = json.dumps({**described, "gate": described["up"]})
    rewrite(file, header, data)
    with pytest.raises(WeightsError, match="tensor 'gate' must be there"):
        read_file(file)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path):
    packed = [compress_tensor(name, values) for name, values in TENSORS.items()]
    planned = planned_of(packed)
    with pytest.raises(StateError, match="3 tensors came, not the 4 planned"):
        write_file(tmp_path / "a", planned, packed[:3])
    with pytest.raises(StateError, match="tensor 'up' was not planned so"):
        write_file(tmp_path / "a", planned, [dense_tensor("up", "F16", (1, 1), np.zeros(2, np.uint8))])
    assert not list(tmp_path.iterdir())
    write_file(tmp_path / "a", planned, packed)
    with pytest.raises(StateError, match="must not exist yet"):
        write_file(tmp_path / "a", planned, packed)


def test_a_checkpoint_of_several_files_and_one_that_lacks_a_tensor(tmp_path):
    places = {}
    for number, (name, values) in enumerate(TENSORS.items()):
        packed = compress_tensor(name, values)
        write_file(tmp_path / f"model-{number}.safetensors", planned_of([packed]), [packed])
        places[name] = f"model-{number}.safetensors"
    write_index(tmp_path, places, 0)
    tensors = open_checkpoint(tmp_path)
    assert all(expand(tensors[name]).tobytes() == values.tobytes() for name, values in TENSORS.items())
    write_index(tmp_path, {**places, "gate": "model-0.safetensors"}, 0)
    with pytest.raises(WeightsError, match=r"model-0.safetensors: tensor 'gate' must be there"):
        open_checkpoint(tmp_path)
    write_index(tmp_path, {**places, "gate": "../other"}, 0)
    with pytest.raises(WeightsError, match="must name files of its own folder"):
        open_checkpoint(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    write_index(tmp_path, places, 0)
    with pytest.raises(WeightsError, match=r"model-1.safetensors must be a safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="must be a safetensors file or a folder with"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "zip"}, CommandError, "format must be one of coded-bitmap, bitmap, groups"),
        ({"bits": 3}, CommandError, "bits one of 16, 8, 4, not coded-bitmap, 3"),
        ({"format": "groups"}, CommandError, "bits must be 8 or 4 with the format groups, not 16"),
    ],
)
def test_options_that_do_not_exist(options, error, message):
    with pytest.raises(error, match=message):
        compress_tensor("up", TENSORS["up"], **options)


def test_tensors_that_cannot_be_quantised():
    with pytest.raises(FormatError, match="must be of fp16 or bf16 to be quantised, not of int8"):
        compress_tensor("x", np.ones((2, 2), np.int8), bits=8)
    with pytest.raises(FormatError, match="not of float32"):
        compress_tensor("x", np.ones((2, 2), np.float32))
