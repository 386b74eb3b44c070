"""Full disks, damaged and shortened checkpoints, removed files, kills: named errors, and nothing partial."""

import json
import os
import resource
import shutil
import signal
import stat
import threading

import pytest

from nearflash.abi.errors import CommandError, NearflashError, StateError, StorageFullError, WeightsError
from nearflash.offload import OffloadedModel, generate
from nearflash.offload.results import Results, prompt_digest
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.verify.fixtures.forked import ForkedProgram

GPU, HOST, DISK = Shares(gpu=1), Shares(host=1), Shares(disk=1)
POLICY = OffloadPolicy(2, 1, DISK, HOST, GPU)


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of a saved model, to be damaged."""
    folder, model = saved("llama")
    shutil.copytree(folder, tmp_path / "model")
    return tmp_path / "model", model


def threads():
    own = ("nearflash-weights", "nearflash-read", "nearflash-cache", "batch")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(own)}


def test_no_room_for_the_cache(saved, tmp_path, prompts):
    folder, _ = saved("llama")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(StorageFullError, match="no room while reserving"):
            generate(folder, prompts(2), OffloadPolicy(2, 1, DISK, DISK, GPU), max_new_tokens=90, scratch=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir()) and not threads()


def test_a_shortened_file_is_reported(copied, prompts):
    folder, _ = copied
    file = folder / "model.safetensors"
    with OffloadedModel(folder, POLICY) as model:
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(WeightsError, match="it was changed while it was in use"):
            model.generate(prompts(4), max_new_tokens=4)
    with pytest.raises(WeightsError):
        generate(folder, prompts(2), POLICY)
    assert not threads()


def test_a_removed_file_stays_readable_and_a_missing_one_is_reported(copied, prompts, plain):
    folder, plain_model = copied
    rows = prompts(4)
    with OffloadedModel(folder, POLICY) as model:
        first = model.generate(rows, max_new_tokens=4)
        (folder / "model.safetensors").unlink()
        assert model.generate(rows, max_new_tokens=4).tokens == first.tokens == plain(plain_model, rows, 2, 4)
    with pytest.raises(WeightsError, match="must be a safetensors file or a folder"):
        generate(folder, rows, POLICY)


def test_a_file_that_is_replaced_before_its_first_use_is_not_mixed_in(copied, prompts, plain):
    folder, plain_model = copied
    rows = prompts(4)
    with OffloadedModel(folder, POLICY) as model:
        file = folder / "model.safetensors"
        other = bytearray(file.read_bytes())
        other[len(other) // 2 :] = bytes(len(other) - len(other) // 2)
        file.unlink()
        file.write_bytes(other)
        assert model.generate(rows, max_new_tokens=4).tokens == plain(plain_model, rows, 2, 4)


def test_a_file_that_is_written_to_during_a_run_is_an_error(copied, prompts):
    """It gave tokens of a mixture of two models."""
    folder, _ = copied
    with OffloadedModel(folder, POLICY) as model:
        model.generate(prompts(2), max_new_tokens=2)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(bytes(100))
        with pytest.raises(WeightsError, match="it was changed while it was in use"):
            model.generate(prompts(2), max_new_tokens=4)
    assert not threads()


def test_a_damaged_tensor_of_a_compressed_file_is_reported(compressed, prompts):
    from nearflash.weights.checkpoint import open_checkpoint

    folder = compressed("coded-bitmap", 16)
    tensor = next(t for name, t in open_checkpoint(folder).items() if t.form != "dense" and "layers.2" in name)
    with tensor.path.open("r+b") as file:
        file.seek(tensor.offset + tensor.stored_bytes // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))
    with pytest.raises(NearflashError, match=r"layers\.2"):
        generate(folder, prompts(2), POLICY, max_new_tokens=4)
    assert not threads()


def test_a_model_that_is_none(tmp_path):
    with pytest.raises(CommandError, match=r"folder with a config\.json"):
        generate(tmp_path, [[5]], POLICY)


# The results file


def run(folder, rows, file, **options):
    return generate(folder, rows, POLICY, max_new_tokens=6, results=file, **options)


def test_results_are_written_as_blocks_finish_and_not_computed_again(saved, tmp_path, prompts):
    folder, _ = saved("llama")
    rows, file = prompts(6), tmp_path / "results.jsonl"
    sizes = []

    def stop(progress):
        sizes.append(len(file.read_text().splitlines()))
        if progress.finished >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, rows, file, progress=stop)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sizes[0] == 1 and sizes[-1] == 5, "a header, then two blocks of two"
    done = run(folder, rows, file)
    assert done.resumed == 4 and done.report.new_tokens == sum(map(len, done.tokens[4:]))
    assert done.tokens == generate(folder, rows, POLICY, max_new_tokens=6).tokens
    again = run(folder, rows, file)
    assert again.resumed == 6 and again.tokens == done.tokens and again.report.new_tokens == 0


def test_a_killed_run_goes_on(saved, tmp_path, prompts):
    folder, _ = saved("llama")
    rows, file = prompts(6), tmp_path / "results.jsonl"
    script = f"""
import os, signal
from nearflash.offload import generate
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.verify.fixtures.forked import ForkedProgram
policy = OffloadPolicy(2, 1, Shares(disk=1), Shares(host=1), Shares(gpu=1))
def stop(progress):
    if progress.finished >= 2 and progress.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
generate({str(folder)!r}, {rows!r}, policy, max_new_tokens=6, results=__import__("pathlib").Path({str(file)!r}),
         progress=stop)
"""
    program = ForkedProgram(script)
    program.communicate()
    assert program.returncode == -signal.SIGKILL
    with file.open("ab") as torn:
        torn.write(b'{"prompt": 2, "tok')
    resumed = run(folder, rows, file)
    assert resumed.resumed == 2
    assert resumed.tokens == generate(folder, rows, POLICY, max_new_tokens=6).tokens
    assert len(file.read_text().splitlines()) == 7
    assert all(json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "{}\n" + text, "is another program's"),
        (lambda text: "some notes\n", "is another program's"),
        (lambda text: "some notes", "no line that ends"),
        (lambda text: text.replace('"tokens": [', '"tokens": [7, ', 1), "checksum"),
        (lambda text: text.replace('{"prompt": 0', '{"prompt": 1', 1), "checksum"),
        (lambda text: text.replace('"prompt": 1', "prompt", 1), "is damaged"),
    ],
)
def test_another_or_damaged_file_is_refused_and_not_changed(saved, tmp_path, prompts, change, message):
    folder, _ = saved("llama")
    rows, file = prompts(2), tmp_path / "results.jsonl"
    run(folder, rows, file)
    file.write_text(change(file.read_text()))
    before = file.read_bytes()
    with pytest.raises(StateError, match=message):
        run(folder, rows, file)
    assert file.read_bytes() == before


def test_other_prompts_are_refused(saved, tmp_path, prompts):
    folder, _ = saved("llama")
    rows, file = prompts(2), tmp_path / "results.jsonl"
    run(folder, rows, file)
    with pytest.raises(StateError, match="another prompt 0"):
        run(folder, [[9, 9], rows[1]], file)
    with pytest.raises(StateError, match="its first line has another do_sample, temperature, top_k: "):
        run(folder, rows, file, temperature=0.5)


def test_a_line_of_other_results_for_the_same_prompt_is_refused(tmp_path):
    """Of another model, for one: its text stood there as this model's."""
    digests = [prompt_digest([1, 2]), prompt_digest([3])]
    for name in ("a", "b"):
        with Results(tmp_path / name, digests, {"model": name}) as file:
            file.add({0: ([7], f"by {name}")})
            file.add({1: ([8], f"by {name}")})
    a, b = ((tmp_path / name).read_text().splitlines() for name in ("a", "b"))
    (tmp_path / "a").write_text("\n".join([*a[:2], b[2]]) + "\n")
    with pytest.raises(StateError, match=r"line 3 of the results .* is damaged: its checksum is another"):
        Results(tmp_path / "a", digests, {"model": "a"})


def test_a_file_in_use_is_refused(tmp_path):
    digests = [prompt_digest([1, 2])]
    with Results(tmp_path / "results", digests, {}):
        with pytest.raises(StateError, match="in use"):
            Results(tmp_path / "results", digests, {})
    Results(tmp_path / "results", digests, {}).close()


def test_no_room_for_results_leaves_whole_lines(tmp_path):
    digests = [prompt_digest([number]) for number in range(300)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Results(tmp_path / "results", digests, {}) as file:
        file.add({0: ([1], "a")})
        size = (tmp_path / "results").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            with pytest.raises(StorageFullError, match="no room while writing"):
                file.add({1: ([2], "b")})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert (tmp_path / "results").stat().st_size == size and set(file.done) == {0}
        file.add({1: ([2], "b")})
    with Results(tmp_path / "results", digests, {}) as file:
        assert file.done == {0: ([1], "a"), 1: ([2], "b")}


def test_a_model_is_usable_after_an_interrupt(saved, prompts):
    """Loads that were begun for the next layers are of no use to a run that begins again."""
    folder, _ = saved("llama")
    rows = prompts(4)
    with OffloadedModel(folder, POLICY) as model:
        want = model.generate(rows, max_new_tokens=5).tokens
        for layer in range(4):
            original = model.skeleton.layers[layer].mlp.forward

            def interrupt(*args):
                raise KeyboardInterrupt

            model.skeleton.layers[layer].mlp.forward = interrupt
            with pytest.raises(KeyboardInterrupt):
                model.generate(rows, max_new_tokens=5)
            model.skeleton.layers[layer].mlp.forward = original
            assert model.generate(rows, max_new_tokens=5).tokens == want
