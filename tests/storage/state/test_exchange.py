"""Export, import and resharding: the same state to the bit, and files that others can read."""

import json
import os
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

from nearflash.abi.errors import StateError, StorageFullError, UncheckedWarning
from nearflash.storage import Manifest, StateArray, StateStore
from nearflash.storage.state.exchange import export_state, import_state, reshard
from nearflash.storage.state.safetensors import StoredTensor, TensorFile, write_tensors

SHORT = (StateArray("p"), StateArray("m", 1, 1, "momentum_buffer"), StateArray("m_scale", 1, 32), StateArray("v", 2))


def tensors_of(store, array):
    """By name, what a state holds of an array, without padding."""
    stored, whole = store.manifest.array(array), store.read_array(array)
    each = stored.params_per_element
    return {t.name: whole[t.start // each :][: -(-t.params // each)] for t in store.manifest.tensors}


def test_other_readers_see_torchs_names(stored, tmp_path, small):
    with StateStore.open(stored) as store:
        size_bytes = export_state(store, tmp_path / "x.safetensors")
        expected = {array: tensors_of(store, array) for array in ("p", "m", "v")}
    assert (tmp_path / "x.safetensors").stat().st_size == size_bytes
    found = load_file(tmp_path / "x.safetensors")
    assert len(found) == 4 * 3
    for tensor in small.manifest.tensors:
        for array, suffix in (("p", ""), ("m", ".exp_avg"), ("v", ".exp_avg_sq")):
            value = found[tensor.name + suffix]
            assert (value.dtype, tuple(value.shape)) == (torch.float32, tensor.shape)
            assert value.numpy().tobytes() == expected[array][tensor.name].tobytes()
    assert [found[f"{t.name}.step"].item() for t in small.manifest.tensors] == [3, 2, 2]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["nearflash"])["steps"] == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints_both_ways(stored, tmp_path):
    """torch.distributed.checkpoint reads an export as it is, and an import takes what it writes as safetensors."""
    with StateStore.open(stored) as store:
        (tmp_path / "out").mkdir()
        export_state(store, tmp_path / "out" / "model.safetensors")
        state = {
            name: torch.empty_like(value) for name, value in load_file(tmp_path / "out" / "model.safetensors").items()
        }
        checkpoint.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
        checkpoint.save(state, storage_writer=checkpoint.HuggingFaceStorageWriter(str(tmp_path / "back")), no_dist=True)
        (written,) = (tmp_path / "back").glob("*.safetensors")
        with pytest.warns(UncheckedWarning, match="has no checksums"):
            other = import_state(written, [tmp_path / "new"], extent_params=1024)
        with other:
            assert (other.steps, sorted(other.tensor_steps)) == (store.steps, sorted(store.tensor_steps))
            for array in ("p", "m", "v"):
                found, expected = tensors_of(other, array), tensors_of(store, array)
                assert found.keys() == expected.keys()
                assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


@pytest.mark.parametrize("arrays", [None, SHORT], ids=["fp32", "short"])
def test_there_and_back(paths, tmp_path, small, arrays):
    manifest = Manifest.pack([("a", (40, 33), "float32"), ("b", (), "float32"), ("c", (2100,), "bfloat16")], 1024,
                             arrays or small.arrays)  # fmt: skip
    with small.create(paths, manifest) as store:
        small.advance(store, 2)
        export_state(store, tmp_path / "x.safetensors")
        with pytest.raises(StateError, match=r"profile must be 'ieee' as in .*, not 'torch_fused': leave it out"):
            import_state(tmp_path / "x.safetensors", [tmp_path / "new"], profile="torch_fused")
        with import_state(tmp_path / "x.safetensors", [tmp_path / "new"]) as other:
            assert other.manifest == manifest and other.identity != store.identity
            for name in ("steps", "tensor_steps", "metadata", "profile"):
                assert getattr(other, name) == getattr(store, name)
            for array in manifest.arrays:
                found, expected = tensors_of(other, array.name), tensors_of(store, array.name)
                assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
            padding = other.read_array("p")[40 * 33 : manifest.tensors[1].start]
            assert len(padding) and not padding.any()
    names = TensorFile(tmp_path / "x.safetensors").tensors
    assert ("a.momentum_buffer.scale" in names) == (arrays is SHORT)
    with StateStore.open([tmp_path / "new"]) as other:
        small.advance(other)


def test_a_file_of_another_origin(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(3, 70, generator=generator) for name in ("w", "w.exp_avg", "w.exp_avg_sq", "u")}
    tensors["w.step"] = torch.tensor(7.0)
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.warns(UncheckedWarning, match="x.safetensors has no checksums, as another program wrote it"):
        store = import_state(tmp_path / "x.safetensors", [tmp_path / "a", tmp_path / "b"], extent_params=1024)
    with store:
        order = [t.name for t in store.manifest.tensors]
        assert store.steps == 7 and dict(zip(order, store.tensor_steps, strict=True)) == {"w": 7, "u": 0}
        for array, suffix in (("p", ""), ("m", ".exp_avg"), ("v", ".exp_avg_sq")):
            for name, value in tensors_of(store, array).items():
                wanted = tensors.get(name + suffix, torch.zeros(210)).reshape(-1).numpy()
                np.testing.assert_array_equal(value, wanted)


def test_files_that_are_not_taken(tmp_path, stored):
    for content in (b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0[1,2,3] "):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(StateError, match="must be a safetensors file"):
            import_state(tmp_path / "x", [tmp_path / "new"])
    save_file({"w": torch.zeros(3, dtype=torch.float16)}, tmp_path / "half")
    with (
        pytest.warns(UncheckedWarning),
        pytest.raises(StateError, match=r"must hold StoredTensor\(name='w', dtype='F32'.*not .*F16"),
    ):
        import_state(tmp_path / "half", [tmp_path / "new"])
    with StateStore.open(stored) as store:
        export_state(store, tmp_path / "good")
        with pytest.raises(StateError, match="good must not exist yet"):
            export_state(store, tmp_path / "good")
        with pytest.raises(StorageFullError, match="cannot be written"):
            export_state(store, tmp_path / "nowhere" / "x")
    with safe_open(tmp_path / "good", "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name != "head.exp_avg"}  # noqa: SIM118
        about = {"nearflash": file.metadata()["nearflash"]}
    save_file(kept, tmp_path / "less", about)
    with pytest.raises(StateError, match="must have the checksums of an export"):
        import_state(tmp_path / "less", [tmp_path / "new"])
    listed = [StoredTensor(name, "F32", tuple(value.shape)) for name, value in kept.items()]
    write_tensors(tmp_path / "checked", listed, about, (v.numpy().reshape(-1).view(np.uint8) for v in kept.values()))
    with pytest.raises(StateError, match=r"must hold .*'head.exp_avg'.*, not None"):
        import_state(tmp_path / "checked", [tmp_path / "new"])
    assert not (tmp_path / "new").exists()


def test_no_mutation_of_an_export_is_another_state(stored, tmp_path):
    """175 of 500 had been imported without a word."""
    with StateStore.open(stored) as store:
        export_state(store, tmp_path / "x")
        expected = {array: tensors_of(store, array) for array in ("p", "m", "v")}, store.steps, store.metadata
    content = (tmp_path / "x").read_bytes()
    rng, header = np.random.default_rng(1), 8 + int.from_bytes(content[:8], "little")
    rejected = 0
    for number in range(120):
        mutated = bytearray(content)
        place = int(rng.integers(header if number % 2 else len(content)))
        mutated[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "y").write_bytes(mutated[: place if number % 10 == 9 else None])
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always")
            try:
                other = import_state(tmp_path / "y", [tmp_path / "new"])
            except StateError:
                rejected += 1
                assert not (tmp_path / "new").exists()
                continue
        with other:  # of what is not the state's: a scalar `step`, for other readers
            found = {array: tensors_of(other, array) for array in ("p", "m", "v")}, other.steps, other.metadata
            same = all(
                found[0][array][name].tobytes() == value.tobytes()
                for array in expected[0]
                for name, value in expected[0][array].items()
            )
            assert noticed or (same and found[1:] == expected[1:])
        (tmp_path / "new").unlink()
    assert rejected > 80


def test_two_exports_to_one_name(stored, tmp_path, monkeypatch):
    """They had shared one partial file, and both had said that all was well."""
    with StateStore.open(stored) as store:
        real = os.fsync

        def late(descriptor):
            monkeypatch.setattr(os, "fsync", real)
            export_state(store, tmp_path / "x")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", late)
        with pytest.raises(StateError, match="x must not exist yet: another one was written meanwhile"):
            export_state(store, tmp_path / "x")
        import_state(tmp_path / "x", [tmp_path / "new"]).close()
    assert sorted(path.name for path in tmp_path.iterdir() if path not in stored) == ["new", "x"]


def test_an_export_follows_no_link_and_is_the_users_alone(stored, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x.partial").symlink_to(tmp_path / "victim")
    before = os.umask(0)
    try:
        with StateStore.open(stored) as store:
            export_state(store, tmp_path / "x")
    finally:
        os.umask(before)
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_names_that_collide(tmp_path, small):
    manifest = Manifest.pack([("w", (3,), "float32"), ("w.exp_avg", (3,), "float32")], 1024)
    with small.create([tmp_path / "state"], manifest) as store:
        with pytest.raises(StateError, match="names of its 8 tensors must differ"):
            export_state(store, tmp_path / "x")


@pytest.mark.parametrize("files, ratio", [(1, None), (3, None), (2, (3, 1))])
def test_resharding_keeps_every_byte(stored, tmp_path, small, files, ratio):
    paths = [tmp_path / f"new-{index}" for index in range(files)]
    with StateStore.open(stored) as store:
        before = [path.read_bytes() for path in stored]
        reshard(store, paths, stripe_ratio=ratio).close()
        identity = store.identity
    assert [path.read_bytes() for path in stored] == before
    with StateStore.open(paths) as store:
        assert (store.steps, store.identity) == (3, identity)
        small.assert_exact(store)
        small.advance(store)
        small.assert_exact(store)


def test_files_of_two_stripes_are_not_mixed(pair, tmp_path):
    paths = [tmp_path / "new-0", tmp_path / "new-1"]
    with StateStore.open(pair) as store:
        reshard(store, paths, stripe_ratio=(2, 1)).close()
    with pytest.raises(StateError, match=r"new-1 must be striped \(1, 1\) as .*state-a is, not \(2, 1\)"):
        StateStore.open([pair[0], paths[1]])


def test_a_pipe_is_no_export(tmp_path):
    """To read it had waited for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="must be a safetensors file"):
        import_state(tmp_path / "pipe", [tmp_path / "new"])
