"""master="split": the bits of an fp32 master, in two halves of which one is the model's own weight."""

import copy

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, FormatError, StateError, StorageFullError
from nearflash.storage import Manifest, StateStore
from nearflash.storage.state import state_file
from nearflash.storage.state.exchange import export_state, import_state, reshard
from nearflash.storage.state.master import round_master
from nearflash.storage.state.ranks import reshard_offline
from nearflash.training import (
    NearStorageAdagrad,
    NearStorageAdamW,
    NearStorageLion,
    NearStorageMuon,
    NearStorageSGD,
    TopK,
)
from nearflash.training.blocks import stream_blocks
from nearflash.training.integrations.shards import ShardedOptimizer
from nearflash.training.step.transfer import Transfer

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "extent_params": 1024, "direct": False}


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(24, 96), torch.nn.GELU(), torch.nn.Linear(96, 24), torch.nn.LayerNorm(24)]
    return torch.nn.Sequential(*layers).to(dtype)


def open_optimizer(path, model, **options):
    return NearStorageAdamW(model.named_parameters(), path=path, **OPTIONS | options)


def put_gradients(model, step, *others):
    """Of a loss of the model; the others get the same. Each has had its step: a thread may look at gradients before."""
    torch.manual_seed(100 + step)
    model.zero_grad()
    model(torch.randn(8, 24, dtype=torch.bfloat16)).square().mean().backward()
    for other in others:
        for parameter, given in zip(other.parameters(), model.parameters(), strict=True):
            parameter.grad = None if given.grad is None else given.grad.clone()


def train(optimizer, model, steps=1):
    for _ in range(steps):
        put_gradients(model, optimizer.steps)
        optimizer.step()


def words(model):
    return [p.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1).copy() for p in model.parameters()]


def masters(optimizer):
    """fp32 bits of each tensor."""
    p, manifest = optimizer.store.read_array("p").view(np.uint32), optimizer.store.manifest
    return [p[entry.start : entry.start + entry.params] for entry in manifest.tensors]


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "mx8"])
@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}, {"max_grad_norm": 1e-3, "resident_bytes": 1 << 20}],
                         ids=["step", "backward", "resident"])  # fmt: skip
def test_20_steps_and_a_resumption_have_the_bits_of_an_fp32_master(tmp_path, state_format, options):
    """And the weights are those masters, rounded to nearest with ties away from zero."""
    model, other = make_model(), make_model()
    options |= {"state_format": state_format}
    split = open_optimizer(tmp_path / "split", model, master="split", **options)
    whole = open_optimizer(tmp_path / "whole", other, **options)
    for step in range(20):
        if step == 10:
            split.close()
            model = make_model()
            split = open_optimizer(tmp_path / "split", model, master="split", resume=True, **options)
        put_gradients(model, step, other)
        split.step()
        whole.step()
        assert_same(masters(split), masters(whole))
    assert_same(words(model), [round_master(p.view(np.float32)) for p in masters(split)])
    for name in split.store.manifest.arrays[1:]:
        np.testing.assert_array_equal(split.store.read_array(name.name), whole.store.read_array(name.name))
    assert split.store.verify() == []
    split.close()
    whole.close()


@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}, {"resident_bytes": 1 << 24, "max_grad_norm": 1.0}],
                         ids=["step", "backward", "resident"])  # fmt: skip
def test_few_weights_that_change_have_the_bits_too(tmp_path, options):
    """At a small rate steps write what changes alone, then all weights again; resumed in between, and undone."""
    models = make_model(), make_model()
    for model in models:
        model.extra = torch.nn.Parameter(torch.randn(20_000, generator=torch.manual_seed(8)).mul(0.1).bfloat16())
    options |= {"lr": 1e-5, "extent_params": 8192, "state_format": "mx8"}
    split, whole = (open_optimizer(tmp_path / master, model, master=master, **options)
                    for master, model in zip(("split", "fp32"), models, strict=True))  # fmt: skip
    written = []
    for step in range(24):
        if step % 5 == 3:
            split.close()
            split = open_optimizer(tmp_path / "split", models[0], master="split", resume=True, **options)
        if step == 14:
            split.rollback()
            whole.rollback()
        before = split.report.traffic.flash_written_bytes
        torch.manual_seed(step)
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            mine.grad = theirs.grad = torch.randn_like(mine)
        split.step()
        whole.step()
        written.append((split.report.traffic.flash_written_bytes - before) / split.store.manifest.params)
        assert_same(masters(split), masters(whole))
        assert_same(words(models[0]), [round_master(p.view(np.float32)) for p in masters(split)])
    assert sum(1 for bytes_a_param in written if bytes_a_param < 6.5) >= 18 and max(written) > 7.5
    assert split.store.verify() == []
    split.close()
    whole.close()


def test_only_the_rest_is_read_and_only_changes_of_weights_are_written(tmp_path):
    """Bytes a parameter of a step: 2 + 4 + 4 read, with fp32 moments, and as many written and what changes; a block at
    least of an extent, all weights where they all change."""
    params = 1 << 17  # scales, a byte for 32, then fill their blocks of 4,096
    for state_format, moments in (("fp32", 8), ("bf16", 4), ("mx8", 2 + 2 / 32)):
        weight = torch.nn.Parameter(torch.ones(params, dtype=torch.bfloat16))
        options = OPTIONS | {"extent_params": params, "state_format": state_format}
        for lr, weights in ((1e-3, 4096 / params), (0.5, 2)):
            path = tmp_path / f"{state_format}-{lr}"
            optimizer = NearStorageAdamW([weight], path=path, master="split", **options | {"lr": lr})
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            traffic = optimizer.report.traffic
            assert traffic.flash_read_bytes / params == 2 + moments
            assert traffic.flash_written_bytes / params == 2 + moments + weights
            optimizer.close()


def test_other_weights_are_refused_by_name(tmp_path):
    model = make_model(torch.float16)
    with pytest.raises(
        FormatError, match=r"parameter '0\.weight' must be bfloat16 or float32, not float16, as its master is split"
    ):
        open_optimizer(tmp_path / "a", model, master="split")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FormatError, match="param_dtype must be None or 'bf16' with a split master, not 'fp16'"):
        open_optimizer(tmp_path / "a", model, master="split", param_dtype="fp16")
    with pytest.raises(FormatError, match="master must be one of fp32, split, not 'halves'"):
        open_optimizer(tmp_path / "a", model, master="halves")


def test_steps_that_change_most_weights_look_for_changes_now_and_then(tmp_path, monkeypatch):
    """They write all weights, and neither keep nor compare those before, until they look again."""
    weight, calls, find = torch.nn.Parameter(torch.ones(8192).bfloat16()), [], state_file.find_changes
    monkeypatch.setattr(state_file, "find_changes", lambda *given: calls.append(optimizer.steps) or find(*given))
    options = OPTIONS | {"extent_params": 8192, "lr": 0.5, "resident_bytes": 1 << 20}
    optimizer = NearStorageAdamW([weight], path=tmp_path / "a", master="split", **options)
    for step in range(11):
        optimizer.param_groups[0]["lr"] = 0.5 if step < 8 else 1e-6
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert calls == [0, 8, 9, 10]
    optimizer.close()


@pytest.mark.parametrize("first", ["split", "fp32"])
def test_a_resumed_state_keeps_its_master(tmp_path, first):
    second = {"split": "fp32", "fp32": "split"}[first]
    open_optimizer(tmp_path / "a", make_model(), master=first).close()
    model = make_model()
    before = words(model)
    with pytest.raises(StateError, match=f"master must be '{first}' as in .*, not '{second}'; pass that"):
        open_optimizer(tmp_path / "a", model, master=second, resume=True)
    assert_same(words(model), before)


def test_a_weight_that_was_changed_is_refused_and_can_be_accepted(tmp_path, monkeypatch):
    """By the fingerprints; and, were it changed after they were taken, by the checksum of what was written."""
    model = make_model()
    optimizer = open_optimizer(tmp_path / "a", model, master="split")
    train(optimizer, model, 2)
    before = masters(optimizer)
    model[0].weight.data[1, 2] = 3.0
    put_gradients(model, 2)
    with pytest.raises(StateError, match=r"'0\.weight' must be changed by this optimizer only"):
        optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._optimizer_state.flat, "find_changed", lambda **_: [])
        patch.setattr(optimizer._runner, "_accept", lambda *_: None)
        with pytest.raises(StateError, match=r"the weights in '0\.weight' .*are not those of step 2: call accept"):
            optimizer.step()
    assert_same(masters(optimizer), before)
    optimizer.accept_parameters()
    before[0][26] = 0x40400000
    assert_same(masters(optimizer), before)
    optimizer.step()
    assert optimizer.steps == 3
    optimizer.close()


def test_the_status_tells_the_halves_and_older_programs_refuse_the_file(tmp_path, capsys):
    from nearflash.cli.main import main

    optimizer = open_optimizer(tmp_path / "a", make_model(), master="split")
    optimizer.close()
    assert main(["state", "status", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "array weight: 2 bytes\narray rest: 2 bytes\narray m: 4 bytes, exp_avg" in out
    with StateStore.open(tmp_path / "a", direct=False) as store:
        listed = store.manifest.to_json()
        assert [array["name"] for array in listed["arrays"]] == ["weight", "rest", "m", "v"]
        assert "master" not in listed
        assert Manifest.from_json(listed) == store.manifest
    with pytest.raises(StateError, match="a manifest must have no master"):
        Manifest.from_json(listed | {"master": "fp32"})
    with pytest.raises(StateError, match="arrays must begin with"):
        Manifest.from_json(listed | {"arrays": listed["arrays"][1:]})


def test_a_device_without_the_format_is_refused_before_a_file_is_made(tmp_path, monkeypatch):
    from nearflash.device.backends.host.update import HostDevice

    with HostDevice.open("update-smartssd") as device:
        device.build = device.identity.config
        with pytest.raises(CommandError, match="master must be fp32 on update-smartssd, not split"):
            open_optimizer(tmp_path / "a", make_model(), master="split", device=device)
    assert not list(tmp_path.iterdir())


def make_two(tmp_path, make=open_optimizer, **options):
    """A split master and a whole one, of equal models."""
    models = make_model(), make_model()
    return models, [make(tmp_path / master, model, master=master, **options)
                    for master, model in zip(("split", "fp32"), models, strict=True)]  # fmt: skip


def train_both(models, optimizers, steps=3):
    """By the same gradients; their masters then are the same."""
    for _ in range(steps):
        put_gradients(models[0], optimizers[0].steps, models[1])
        for optimizer in optimizers:
            optimizer.step()
    assert_same(*map(masters, optimizers))
    assert_same(words(models[0]), [round_master(p.view(np.float32)) for p in masters(optimizers[0])])


OTHERS = {
    "sgd": (NearStorageSGD, {"momentum": 0.9}), "lion": (NearStorageLion, {"state_format": "mx8"}),
    "adagrad": (NearStorageAdagrad, {}), "topk": (NearStorageAdamW, {"compression": TopK(0.1)}),
    "two devices": (NearStorageAdamW, {"device": ["host", "host"]}),
    "torch's order": (NearStorageAdamW, {"profile": "torch_fused"}),
    "freed gradients": (NearStorageAdamW, {"overlap": "backward", "free_gradients": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_and_options_have_the_bits_too(tmp_path, name):
    kind, more = OTHERS[name]

    def make(path, model, **options):
        path.mkdir()
        return kind(model.named_parameters(), path=path, **OPTIONS | more | options)

    models, optimizers = make_two(tmp_path, make)
    if name == "freed gradients":
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                torch.manual_seed(step)
                (model[2].weight * torch.randn(24, 96)).sum().backward()
                optimizer.step()
        assert_same(*map(masters, optimizers))
    else:
        train_both(models, optimizers)
    for optimizer in optimizers:
        optimizer.close()


def test_muon_has_the_bits_too(tmp_path):
    def make(path, model, **options):
        matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
        return NearStorageMuon(matrices, path=path, **OPTIONS | options)

    models, optimizers = make_two(tmp_path, make)
    for model in models:
        for name, parameter in list(model.named_parameters()):
            parameter.requires_grad_("weight" in name and parameter.ndim == 2)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            optimizer.step()
    assert_same(*map(masters, optimizers))
    for optimizer in optimizers:
        optimizer.close()


def test_a_snapshot_a_rollback_and_a_whole_state_come_back(tmp_path):
    models, optimizers = make_two(tmp_path)
    train_both(models, optimizers)
    for optimizer in optimizers:
        optimizer.store.snapshot(tmp_path / f"{optimizer.store.paths[0].name}-3")
    at_3 = masters(optimizers[0])
    whole = [optimizer.full_state_dict() for optimizer in optimizers]
    train_both(models, optimizers, 2)
    for optimizer in optimizers:
        optimizer.rollback()
    train_both(models, optimizers, 1)
    for optimizer in optimizers:
        optimizer.restore(tmp_path / f"{optimizer.store.paths[0].name}-3")
    assert_same(masters(optimizers[0]), at_3)
    train_both(models, optimizers, 2)
    optimizers[0].restore(tmp_path / "fp32-3")
    optimizers[1].restore(tmp_path / "split-3")
    assert_same(masters(optimizers[0]), at_3)
    train_both(models, optimizers, 2)
    # The state of either in the other: masters are what both speak of.
    for optimizer, given in zip(optimizers, whole[::-1], strict=True):
        optimizer.load_full_state_dict(given)
    assert_same(masters(optimizers[0]), at_3)
    train_both(models, optimizers, 2)
    for optimizer in optimizers:
        optimizer.close()


def test_export_import_and_resharding_keep_the_master(tmp_path):
    models, optimizers = make_two(tmp_path)
    train_both(models, optimizers)
    for optimizer, model in zip(optimizers, models, strict=True):
        store = optimizer._optimizer_state.store
        export_state(store, tmp_path / "out.safetensors")
        with import_state(tmp_path / "out.safetensors", [tmp_path / "again"], direct=False) as again:
            assert again.manifest == store.manifest
        with reshard(store, [tmp_path / "one", tmp_path / "two"], direct=False) as both:
            assert both.manifest == store.manifest
        optimizer.close()
        master = optimizer._settings.master
        again = open_optimizer(tmp_path / "again", model, master=master, resume=True)
        assert_same(masters(again), masters_of := masters(again))
        train(again, model)
        devices = {"path": [tmp_path / "one", tmp_path / "two"], "device": ["host", "host"]}
        other = NearStorageAdamW(make_model().named_parameters(), master=master, resume=True, **OPTIONS | devices)
        assert_same(masters_of, masters(other))
        other.close()
        again.close()
        for name in ("again", "one", "two", "out.safetensors"):
            (tmp_path / name).unlink()


def test_a_tensor_that_comes_later_and_a_delta(tmp_path):
    models, optimizers = make_two(tmp_path, delta_bytes=1 << 20)
    for model in models:
        model[3].weight.requires_grad_(False)
    train_both(models, optimizers, 2)
    before = words(models[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(5)
        model.extra = torch.nn.Parameter(torch.randn(40).to(torch.bfloat16))
        optimizer.add_param_group({"params": [("extra", model.extra)]})
        with pytest.raises(FormatError, match="must be bfloat16" if optimizer is optimizers[0] else "nothing"):
            optimizer.add_param_group({"params": [("odd", torch.nn.Parameter(torch.ones(3).half()))]})
            raise FormatError("nothing")
    since = optimizers[0].steps
    at_2 = words(models[0])
    for model in models:
        torch.manual_seed(6)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    changes = optimizers[0].delta(since=since).changes
    names = [name for name, _ in models[0].named_parameters()]
    for name, old, new in zip(names, at_2, words(models[0]), strict=True):
        after = old.copy()
        if name in changes:
            after[changes[name].indices] = changes[name].words
        np.testing.assert_array_equal(after, new)
    assert len(before) + 1 == len(at_2)
    for optimizer in optimizers:
        optimizer.close()


def test_streamed_weights_are_read_with_their_rests(tmp_path):
    """Tensors that hold no values: both halves come from the file then."""
    layers = [torch.nn.Linear(24, 24) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Sequential(*layers)).to(torch.bfloat16)
    other = copy.deepcopy(model)
    streamed = open_optimizer(tmp_path / "a", model, master="split")
    plain = open_optimizer(tmp_path / "b", other, master="split")
    stream_blocks(model, streamed)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(5, 24, dtype=torch.bfloat16)
        for one, optimizer in ((model, streamed), (other, plain)):
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    assert_same(masters(streamed), masters(plain))
    streamed.close()
    plain.close()


def test_one_ranks_file_is_divided_with_its_halves(tmp_path):
    model = make_model()
    (tmp_path / "run").mkdir()
    model[3].float()
    optimizer = ShardedOptimizer(model.parameters(), path=tmp_path / "run", master="split", **OPTIONS)
    optimizer.prepare()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.close()
    (path,) = (tmp_path / "run").glob("rank*.state")
    for again in reshard_offline([path], tmp_path / "two", 2, direct=False):
        with StateStore.open(path, direct=False) as one, StateStore.open(again, direct=False) as other:
            assert one.manifest == other.manifest and one.manifest.master == "split" and other.verify() == []
            for array in one.manifest.stored:
                assert (one.read_array(array.name) == other.read_array(array.name)).all()


@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}], ids=["step", "backward"])
def test_a_step_that_fails_leaves_weights_that_the_next_one_takes(tmp_path, monkeypatch, options):
    """Some tensors have new values by then: they get those of the halves again, to the bit."""
    models, optimizers = make_two(tmp_path, **options)
    train_both(models, optimizers, 2)
    before, calls, write = words(models[0]), [], Transfer.write

    def fail(transfer, slot):
        calls.append(slot)
        if len(calls) > 2:
            raise StorageFullError("no room")
        write(transfer, slot)

    put_gradients(models[0], 2, models[1])
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "write", fail)
        with pytest.raises(StorageFullError, match="no room"):
            optimizers[0].step()
    assert_same(words(models[0]), before)
    for optimizer in optimizers:
        optimizer.step()
    assert_same(*map(masters, optimizers))
    train_both(models, optimizers, 2)
    for optimizer in optimizers:
        optimizer.close()


def test_a_damaged_half_is_named_when_it_is_read(tmp_path):
    """The rest by the next step, the weights by `verify` and a resumption, which read them."""
    for half, step_fails in (("rest", True), ("weight", False)):
        model, path = make_model(), tmp_path / half
        optimizer = open_optimizer(path, model, master="split")
        train(optimizer, model)
        (file,) = optimizer._optimizer_state.store._files
        extent = file.layout.extents[1]
        offset = file.layout.array_offset(file.version.extents[half, 1].slot, half, extent)
        with path.open("r+b") as raw:
            raw.seek(offset)
            byte = raw.read(1)
            raw.seek(offset)
            raw.write(bytes([byte[0] ^ 1]))
        assert [f"array {half} of step 1 is damaged" in message for message in optimizer.store.verify()] == [True]
        if step_fails:
            with pytest.raises(StateError, match="array rest of step 1 is damaged in tensors"):
                train(optimizer, model)
        else:
            train(optimizer, model)
            assert optimizer.store.verify() == []
        optimizer.close()
