"""Published versions: what serving engines read, bound to their base, whole or not there."""

import json

import numpy as np
import pytest

from nearflash.abi.errors import StateError, StorageFullError
from nearflash.cli.main import main
from nearflash.device.backends.host.delta import Changes
from nearflash.storage.state import weight_patch
from nearflash.storage.state.delta_log import TensorMark, WeightDelta
from nearflash.storage.state.fingerprint import fingerprint_bytes
from nearflash.storage.state.safetensors import StoredTensor, TensorFile, write_tensors
from nearflash.storage.state.weight_patch import WeightPatch, apply_patch, newest_version, publish_patch

SHAPES = {"embed": (50, 40), "norm": (9,), "empty": (0,), "head": (7, 3)}
DTYPES = {"embed": "bfloat16", "norm": "float32", "empty": "bfloat16", "head": "bfloat16"}
FORMATS = {"bfloat16": "BF16", "float32": "F32"}


def make_versions(count=4):
    rng = np.random.default_rng(4)
    kinds = {"bfloat16": np.uint16, "float32": np.uint32}
    first = {n: rng.integers(0, 60_000, SHAPES[n]).astype(kinds[DTYPES[n]]) for n in SHAPES}
    versions = [first]
    for _ in range(count - 1):
        new = {name: words.copy() for name, words in versions[-1].items()}
        new["embed"].reshape(-1)[rng.integers(0, 2000, 40)] ^= 1
        new["norm"][rng.integers(0, 9)] ^= 1
        versions.append(new)
    return versions


def delta_between(versions, since, step):
    old, new = versions[since], versions[step]
    marks, changes = [], {}
    for name in SHAPES:
        prints = [fingerprint_bytes(x[name].reshape(-1).view(np.uint8)) for x in (old, new)]
        marks.append(TensorMark(name, SHAPES[name], DTYPES[name], *prints))
        indices = np.flatnonzero(old[name].reshape(-1) != new[name].reshape(-1))
        if indices.size:
            changes[name] = Changes(indices, new[name].reshape(-1)[indices])
    return WeightDelta("0" * 16, since, step, tuple(marks), changes)


def save(path, version):
    tensors = [StoredTensor(name, FORMATS[DTYPES[name]], SHAPES[name]) for name in SHAPES]
    write_tensors(path, tensors, {"format": "pt"}, [x.reshape(-1).view(np.uint8) for x in version.values()])


def copy_of(version):
    return {name: words.copy() for name, words in version.items()}


def same(found, expected):
    return all((found[name] == expected[name]).all() for name in SHAPES)


def test_a_follower_gets_every_version(tmp_path):
    versions = make_versions()
    follower = copy_of(versions[0])
    for since, step in ((0, 1), (1, 3)):
        published = publish_patch(delta_between(versions, since, step), tmp_path)
        patch = WeightPatch.open(tmp_path, newest_version(tmp_path))
        assert (patch.base_version, patch.version, patch.sha256) == (since, step, published.sha256)
        assert apply_patch(patch, follower) == sum((versions[since][n] != versions[step][n]).sum() for n in SHAPES)
        assert same(follower, versions[step])


def test_the_file_is_what_safetensors_reads(tmp_path):
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    versions = make_versions()
    patch = publish_patch(delta_between(versions, 0, 1), tmp_path)
    tensors = safetensors.load_file(patch.path)
    assert set(tensors) == {f"{name}.{part}" for name in ("embed", "norm") for part in ("indices", "values")}
    assert tensors["embed.indices"].dtype is torch.int32 and tensors["embed.values"].dtype is torch.bfloat16
    base = torch.from_numpy(versions[0]["embed"].reshape(-1).view(np.int16)).view(torch.bfloat16)
    base[tensors["embed.indices"].long()] = tensors["embed.values"]
    np.testing.assert_array_equal(base.view(torch.int16).numpy().view(np.uint16), versions[1]["embed"].reshape(-1))


def test_another_base_is_refused_and_nothing_changes(tmp_path):
    versions = make_versions()
    publish_patch(delta_between(versions, 1, 2), tmp_path)
    patch = WeightPatch.open(tmp_path, 2)
    for wrong, message in (
        (copy_of(versions[0]), "'embed' must be as in version 1, from which version 2 follows"),
        (copy_of(versions[1]) | {"head": np.zeros((7, 3), np.uint16)}, "'head' must be as in version 1"),
        (copy_of(versions[1]) | {"head": np.zeros((3, 7), np.uint16)}, r"'head' must be words of bfloat16 \[7, 3\]"),
        ({name: words for name, words in versions[1].items() if name != "norm"}, "must have 'norm'"),
    ):
        before = copy_of(wrong) if len(wrong) == len(SHAPES) else None
        with pytest.raises(StateError, match=message):
            apply_patch(patch, wrong)
        assert before is None or all((wrong[name] == before[name]).all() for name in wrong)


def test_versions_follow_one_another(tmp_path):
    versions = make_versions()
    publish_patch(delta_between(versions, 0, 1), tmp_path)
    with pytest.raises(StateError, match="from version 1, its newest, not from 2: pass since=1"):
        publish_patch(delta_between(versions, 2, 3), tmp_path)
    other = [copy_of(version) for version in versions]
    other[1]["head"][0, 0] ^= 1
    with pytest.raises(StateError, match=r"weights of version 1 of .* at step 1, but it had others: of another run"):
        publish_patch(delta_between(other, 1, 2), tmp_path)
    with pytest.raises(StateError, match="a version must have steps behind its base"):
        publish_patch(WeightDelta("0" * 16, 1, 1, (), {}), tmp_path)
    with pytest.raises(StateError, match="a version must have steps behind its base"):
        publish_patch(WeightDelta("0" * 16, 1, 1, (), {}), tmp_path / "new" / "patches")
    assert not (tmp_path / "new").exists()
    assert newest_version(tmp_path) == 1


@pytest.mark.parametrize("killed_at", ["write_tensors", "write_durably", "_digest"])
def test_a_publisher_that_is_killed_leaves_no_half_version(tmp_path, monkeypatch, killed_at):
    versions = make_versions()
    publish_patch(delta_between(versions, 0, 1), tmp_path)
    with monkeypatch.context() as broken, pytest.raises(SystemExit):
        real = getattr(weight_patch, killed_at)

        def die(path, *arguments, **options):
            if "00000002" in str(path):
                raise SystemExit
            return real(path, *arguments, **options)

        broken.setattr(weight_patch, killed_at, die)
        publish_patch(delta_between(versions, 1, 2), tmp_path)
    assert newest_version(tmp_path) == 1
    with pytest.raises(StateError, match=r"must have version 2, but version-00000002\.json is not there; .* is 1"):
        WeightPatch.open(tmp_path, 2)
    publish_patch(delta_between(versions, 1, 3), tmp_path)
    follower = copy_of(versions[1])
    apply_patch(WeightPatch.open(tmp_path, 3), follower)
    assert same(follower, versions[3])


@pytest.mark.parametrize("harm", ["data", "digest", "after", "format"])
def test_a_damaged_version_is_refused(tmp_path, harm):
    versions = make_versions()
    patch = publish_patch(delta_between(versions, 0, 1), tmp_path)
    manifest = tmp_path / "version-00000001.json"
    about = json.loads(manifest.read_text())
    if harm == "data":
        content = bytearray(patch.path.read_bytes())
        content[-1] ^= 1
        patch.path.write_bytes(content)
    about |= {"digest": {"sha256": "0" * 64}, "format": {"format": 2}}.get(harm, {})
    if harm == "after":
        about["tensors"][0][4] = "0" * 16
    manifest.write_text(json.dumps(about))
    follower = copy_of(versions[0])
    with pytest.raises(StateError, match="publish it again"):
        apply_patch(WeightPatch.open(tmp_path, 1), follower)
    assert same(follower, versions[0])


def test_tensors_past_int32_are_refused(tmp_path):
    mark = TensorMark("huge", (1 << 32,), "bfloat16", 1, 2)
    changes = {"huge": Changes(np.array([1 << 31]), np.array([7], np.uint16))}
    with pytest.raises(StateError, match="fewer than 2\\^31 elements"):
        publish_patch(WeightDelta("0" * 16, 0, 1, (mark,), changes), tmp_path)
    assert newest_version(tmp_path) is None


def test_no_room_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise StorageFullError("no room")

    monkeypatch.setattr(weight_patch, "write_tensors", full)
    with pytest.raises(StorageFullError, match="no room"):
        publish_patch(delta_between(make_versions(), 0, 1), tmp_path)
    with pytest.raises(StateError, match="must be a folder of versions"):
        newest_version(tmp_path / "none")


def test_the_command_brings_a_checkpoint_to_a_version(tmp_path, capsys):
    versions = make_versions()
    folder, first, second = tmp_path / "versions", tmp_path / "0.safetensors", tmp_path / "2.safetensors"
    publish_patch(delta_between(versions, 0, 2), folder)
    save(first, versions[0])
    assert main(["state", "patch", str(first), "--from", str(folder), "--to", str(second)]) == 0
    assert "version 2" in capsys.readouterr().out
    file = TensorFile(second)
    for name, words in versions[2].items():
        np.testing.assert_array_equal(
            file.read(name, 0, words.nbytes).view(words.dtype), words.reshape(-1), err_msg=name
        )
    third = tmp_path / "3.safetensors"
    assert main(["state", "patch", str(second), "--from", str(folder), "--to", str(third)]) != 0
    assert "must be as in version 0" in capsys.readouterr().err and not third.exists()
