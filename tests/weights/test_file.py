import json
import os
from math import prod

import numpy as np
import pytest
from safetensors import safe_open

from nearflash.abi.errors import CommandError, FormatError, ShapeError, StateError, WeightsError
from nearflash.storage.state.safetensors import encode_header
from nearflash.verify.fixtures.files import rot
from nearflash.weights import compress_tensor, expand, open_checkpoint, read_file, write_file
from nearflash.weights.checkpoint import write_index
from nearflash.weights.compress import dense_tensor, fold_shape
from nearflash.weights.file import CHECKPOINT

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
        assert other.metadata()["method"] == "magnitude" and other.metadata()["nearflash_weights"] == "2"
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
    found = fold_shape(rows, columns, step)
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
    text = encode_header(header)
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
    for name in TENSORS:
        with pytest.raises(WeightsError, match=rf"tensor '{name}', .*: reading failed .it was changed while it was in"):
            expand(tensors[name])


def test_a_file_that_is_removed_or_replaced_is_read_to_its_end(file, tmp_path):
    tensors = read_file(file)
    other = [compress_tensor(name, values[::-1]) for name, values in TENSORS.items()]
    write_file(tmp_path / "other", planned_of(other), other)
    (tmp_path / "other").rename(file)
    assert all(expand(tensors[name]).tobytes() == values.tobytes() for name, values in TENSORS.items())


BITMAPS = [("coded", 16), ("bitmap", 16), ("coded-bitmap", 16), ("bitmap", 8), ("bitmap", 4)]
FORMS = [*BITMAPS, ("groups", 8), ("groups", 4), ("dense", 16)]


@pytest.mark.parametrize("version", ["2", "1"])
@pytest.mark.parametrize(("format", "bits"), FORMS)
def test_bytes_of_another_tensor_are_refused_in_its_place(tmp_path, format, bits, version):
    """Whole streams under checksums that hold, from this file and from another one's tensor of the same name."""
    values = pruned((64, 256))
    one, other = values, np.ascontiguousarray(values[:, ::-1])

    def stored(name, values):
        if format == "dense":
            return dense_tensor(name, "F16", values.shape, values.view(np.uint8).ravel())
        return compress_tensor(name, values, format, bits)

    def written(path, **tensors):
        packed = [stored(name, values) for name, values in tensors.items()]
        write_file(path, planned_of(packed), packed)
        if version == "1":
            to_version_1(path)
        return read_file(path)

    tensors = written(tmp_path / "file", a=one, b=other)
    whole = (tmp_path / "file").read_bytes()
    a, b = (whole[each.offset : each.offset + each.stored_bytes] for each in tensors.values())
    assert len(a) == len(b) and expand(tensors["a"]).shape == (64, 256)
    elsewhere = written(tmp_path / "elsewhere", a=other)["a"].read().tobytes()
    assert elsewhere == b
    rot(tmp_path / "file", b + a, tensors["a"].offset)
    for name in "ab":
        with pytest.raises(WeightsError, match=f"tensor '{name}', at byte .*: it is (damaged|another tensor's)"):
            expand(tensors[name])


@pytest.mark.parametrize(("format", "bits"), BITMAPS)
def test_a_row_group_of_another_tensor_is_refused_in_its_place(tmp_path, format, bits):
    values = RNG.normal(0, 0.02, (3 << 10, 1 << 10)).astype(np.float16)  # of several groups
    values[:, ::2] = 0
    mirrored = np.ascontiguousarray(values[:, ::-1])  # groups of other values, and to the byte as large
    packed = [compress_tensor(name, each, format, bits) for name, each in (("a", values), ("b", mirrored))]
    write_file(tmp_path / "file", planned_of(packed), packed)
    tensors, whole = read_file(tmp_path / "file"), (tmp_path / "file").read_bytes()
    groups = []
    for each in tensors.values():
        stop = each.offset + each.stored_bytes
        groups.append((stop - 64 - int.from_bytes(whole[stop - 56 : stop - 48], "little"), stop))
    (first, last), (other_first, other_last) = groups
    assert last - first == other_last - other_first < tensors["a"].stored_bytes // 2
    rot(tmp_path / "file", whole[other_first:other_last], first)
    with pytest.raises(WeightsError, match=r"tensor 'a', at byte .*: .* ends of groups that its header does not state"):
        expand(tensors["a"])


def to_version_1(path):
    """As files were: no checksum of a matrix's header, none of rows."""
    header, data = header_and_data(path)
    metadata = header["__metadata__"]
    described = json.loads(metadata["nearflash_tensors"])
    for each in described.values():
        each.pop("header_crc32c", None)
    metadata.update(nearflash_weights="1", nearflash_tensors=json.dumps(described))
    metadata.pop("nearflash_rows", None)
    text = encode_header(header, int.from_bytes(path.read_bytes()[:8], "little"))
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_files_of_version_1_are_read(file):
    to_version_1(file)
    tensors = read_file(file)
    assert all(expand(tensors[name]).tobytes() == values.tobytes() for name, values in TENSORS.items())


def test_a_file_without_checksums_is_refused(file):
    header, data = header_and_data(file)
    del header["__metadata__"]["crc32c"], header["__metadata__"]["header_crc32c"]
    rewrite(file, header, data)
    with pytest.raises(WeightsError, match="must have the checksums that nearflash writes: compress the model again"):
        read_file(file)


def test_files_of_another_checkpoint_are_refused(tmp_path):
    """A shard of another model's folder, with tensors of the same names and shapes, was taken."""
    names = {name: f"model-{number}.safetensors" for number, name in enumerate(("a", "b"))}
    for folder, values in (("one", TENSORS["up"]), ("two", TENSORS["up"] * 2)):
        (tmp_path / folder).mkdir()
        for name, file in names.items():
            packed = [compress_tensor(name, values)]
            write_file(tmp_path / folder / file, planned_of(packed), packed, {CHECKPOINT: folder})
        write_index(tmp_path / folder, names, 0, folder)
        assert set(open_checkpoint(tmp_path / folder)) == set(names)
    (tmp_path / "two" / names["b"]).rename(tmp_path / "one" / names["b"])
    with pytest.raises(WeightsError, match=r"model-1.* must be of the checkpoint 'one', as .*, not of 'two': copy the"):
        open_checkpoint(tmp_path / "one")
    write_index(tmp_path / "one", names, 0)  # another program's index states nothing; the files still differ
    with pytest.raises(WeightsError, match=r"model-1.* must be of the checkpoint 'one', as .*, not of 'two'"):
        open_checkpoint(tmp_path / "one")


@pytest.mark.parametrize("name", ["..", ".", "", "/etc/passwd", "../other", "a\0b", "pipe", "folder"])
def test_an_index_names_files_of_its_folder_alone(tmp_path, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    write_index(tmp_path, {"a": name}, 0)
    with pytest.raises(WeightsError, match=r"must name files of its own folder|must be (a safetensors file|there)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("version", ["3", {"p": []}, 2, None])
def test_a_newer_version(file, version):
    header, data = header_and_data(file)
    header["__metadata__"]["nearflash_weights"] = version
    rewrite(file, header, data)
    with pytest.raises(WeightsError, match=r"must be of version 2 or 1, not .*: use a newer nearflash"):
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
    with pytest.raises(WeightsError, match=r"model-1.safetensors must be there, as .*index.json states: copy"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="must be a safetensors file or a folder with"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "zip"}, CommandError, "format must be one of coded-bitmap, bitmap, coded, groups"),
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
