"""Weights of blocks on flash: the same bits as in memory, whatever the model, and nothing of them left in memory."""

import gc
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nearflash.abi.errors import CommandError, NonFiniteError, StateError
from nearflash.training import NearStorageAdamW, NearStorageMuon
from nearflash.training.blocks import find_blocks, split_for_muon, stream_blocks
from nearflash.training.step.streamed import is_streamed

WIDTH, VOCABULARY, LAYERS = 32, 50, 4


class Block(torch.nn.Module):
    def __init__(self, shared=None):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.shared = shared or torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.shared(self.norm(x))) * self.scale))


class Model(torch.nn.Module):
    """Tied embedding and head, a layer that two blocks share, a frozen block."""

    def __init__(self, checkpointing=False):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        first = Block()
        self.layers = torch.nn.ModuleList([first, Block(), Block(first.shared), Block()])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)
        self.checkpointing = checkpointing

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
                if self.checkpointing
                else layer(x)
            )
        return self.head(x)


def make(kind=Model, dtype=torch.bfloat16, **options):
    torch.manual_seed(4)
    return kind(**options).to(dtype)


def loss_of(model, step):
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(step))
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def train(model, optimizer, steps):
    losses = []
    for step in range(optimizer.steps, steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def open_optimizer(model, path, **options):
    return NearStorageAdamW(
        model.named_parameters(), lr=1e-2, path=path, extent_params=1024, max_grad_norm=1.0, **options
    )


@pytest.fixture
def plain(tmp_path):
    """Losses, and weights by name, of five steps of a model in memory."""
    model = make()
    with open_optimizer(model, tmp_path / "plain") as optimizer:
        return train(model, optimizer, 5), model.state_dict()


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())


@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}, {"state_format": "mx8"}])
@pytest.mark.parametrize("checkpointing", [False, "reentrant", "non-reentrant"])
def test_bits_are_those_of_the_model_in_memory(tmp_path, plain, checkpointing, options):
    model = make(checkpointing=checkpointing)
    with open_optimizer(model, tmp_path / "streamed", **options) as optimizer:
        stream = stream_blocks(model, optimizer)
        assert all(is_streamed(p) for layer in model.layers for p in layer.parameters())
        assert not is_streamed(model.embed.weight)
        losses, weights = train(model, optimizer, 5), model.state_dict()
        if options.get("state_format") is None:
            assert losses == plain[0]
            assert_same(weights, plain[1])
        stream.close()
        assert_same(
            dict(model.named_parameters()), {n: w for n, w in weights.items() if n in dict(model.named_parameters())}
        )
        assert train(model, optimizer, 6) and not optimizer._optimizer_state.flat.find_changed()


@pytest.mark.parametrize("options", [{"read_ahead": 0}, {"read_ahead": 3, "cached_blocks": 1}])
def test_bits_do_not_depend_on_what_is_read_ahead(tmp_path, plain, options):
    model = make()
    with open_optimizer(model, tmp_path / "streamed") as optimizer:
        stream_blocks(model, optimizer, **options)
        assert train(model, optimizer, 5) == plain[0]
        assert_same(model.state_dict(), plain[1])


def plain_stack(layers=6):
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))


@pytest.mark.parametrize("read_ahead", [0, 1, 2])
def test_blocks_are_read_before_they_run_in_both_directions(tmp_path, monkeypatch, read_ahead):
    """Every block but the first of a pass; each once a pass, and at most `read_ahead` at a time."""
    model = make(plain_stack)
    with open_optimizer(model, tmp_path / "state") as optimizer:
        stream = stream_blocks(model, optimizer, read_ahead=read_ahead)
        waited, most, read, load = [], [], [], stream._source.read

        def reads(parameters):
            place = next(at for at, layer in enumerate(model) if layer.weight is parameters[0])
            (waited if threading.current_thread() is threading.main_thread() else read).append(place)
            return load(parameters)

        monkeypatch.setattr(stream._source, "read", reads)
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: most.append(len(list(stream._ahead))))
            layer.register_full_backward_hook(lambda *_: most.append(len(list(stream._ahead))))
        x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
        assert max(most) <= read_ahead and not list(stream._ahead)
        assert sorted(waited + read) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5], "two blocks are still there behind forward"
        assert sorted(read) == ([0, 1, 1, 2, 2, 3, 3, 4, 5] if read_ahead else [])
        optimizer.step()
        stream.close()


def test_what_was_read_ahead_of_a_step_is_not_used(tmp_path):
    """Forward is left in the middle; the block that was read for it has the weights of the step before."""
    model, other = make(plain_stack), make(plain_stack)
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with open_optimizer(model, tmp_path / "a") as optimizer, open_optimizer(other, tmp_path / "b") as same:
        stream = stream_blocks(model, optimizer)
        for net, chosen in ((model, optimizer), (other, same)):
            net(x).sum().backward()
            net[1](net[0](x))
            chosen.step()
            chosen.zero_grad()
        assert torch.equal(model[2](x), other[2](x)) and torch.equal(model(x), other(x))
        assert all(version == stream.version() for version, _ in stream._ahead)


def test_an_error_of_a_block_that_is_read_ahead_comes_where_it_runs(tmp_path, monkeypatch):
    model = make(plain_stack)
    with open_optimizer(model, tmp_path / "state") as optimizer:
        stream, x = stream_blocks(model, optimizer), torch.ones(2, 64, dtype=torch.bfloat16)
        load = stream._source.read

        def fails(parameters):
            if parameters[0] is model[2].weight and threading.current_thread() is not threading.main_thread():
                raise StateError("reading failed")
            return load(parameters)

        monkeypatch.setattr(stream._source, "read", fails)
        y = model[1](model[0](x))
        with pytest.raises(StateError, match="reading failed"):
            model[2](y)
        assert model[2](y).shape == (2, 64), "read again when it runs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_lists(tmp_path, dtype):
    def kind():
        inner = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])])
        return torch.nn.ModuleDict({"a": inner, "b": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())})

    def run(model, path, streamed):
        with open_optimizer(model, path) as optimizer:
            if streamed:
                assert [type(block) for block in find_blocks(model)] == [
                    torch.nn.Linear,
                    torch.nn.Linear,
                    torch.nn.Sequential,
                ]
                stream_blocks(model, optimizer)
            for _ in range(3):
                first, second = model["a"][0]
                x = model["b"](second(torch.relu(first(torch.ones(2, 8, dtype=dtype)))))
                x.float().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

    assert_same(run(make(kind, dtype), tmp_path / "a", True), run(make(kind, dtype), tmp_path / "b", False))


def test_only_the_blocks_that_run_are_in_memory(tmp_path):
    model = make(kind=lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))))
    with open_optimizer(model, tmp_path / "state") as optimizer:
        stream = stream_blocks(model, optimizer, cached_blocks=1)
        held = []
        for layer in model:
            layer.register_forward_hook(lambda *_: held.append(len(stream._values)))
        x = model(torch.ones(2, 64, dtype=torch.bfloat16))
        values = [weakref.ref(value) for value in stream._values.values()]
        x.sum().backward()
        gc.collect()
        assert held == [2] * 6
        assert len(stream._values) == 2
        assert all(value() is None for value in values) and not stream._running and not +stream._users
        assert all(p.grad is not None and p.untyped_storage().nbytes() == 2 for p in model.parameters())
        extents = {extent.index for p in range(12) for extent in optimizer._optimizer_state.flat.extents_of([p])}
        assert stream.read_bytes >= 2 * 4 * 1024 * len(extents) - 2 * 4096


def test_resume_rollback_restore_and_full_state(tmp_path, plain):
    model = make()
    with open_optimizer(model, tmp_path / "state") as optimizer:
        stream_blocks(model, optimizer)
        train(model, optimizer, 3)
        optimizer.store.snapshot(tmp_path / "snapshot")
        train(model, optimizer, 4)
        optimizer.rollback()
        train(model, optimizer, 5)
        optimizer.restore(tmp_path / "snapshot")
        full = optimizer.full_state_dict()
        optimizer.load_full_state_dict(full)
    other = make()
    with open_optimizer(other, tmp_path / "state", resume=True) as optimizer:
        stream_blocks(other, optimizer)
        loss_of(other, 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(other, 4).backward()
        optimizer.step()
        assert_same(other.state_dict(), plain[1])


def test_a_frozen_block_is_thawed_and_groups_are_added(tmp_path):
    def run(streamed, path):
        model = make()
        head = torch.nn.Parameter(torch.ones(3))
        with open_optimizer(model, path) as optimizer:
            if streamed:
                stream_blocks(model, optimizer)
            train(model, optimizer, 2)
            model.layers[1].requires_grad_(True)
            optimizer.add_param_group({"params": [("more", head)]})
            train(model, optimizer, 4)
            return model.state_dict()

    assert_same(run(True, tmp_path / "a"), run(False, tmp_path / "b"))


def test_matrices_of_blocks_by_muon(tmp_path):
    """In blocks on flash, too: the same bits."""

    def run(streamed, path):
        model = make()
        model.layers[1].requires_grad_(True)
        muon, adamw = split_for_muon(model, lr=1e-3)
        assert [name for name, _ in muon["params"]] == [
            name for name, p in model.named_parameters() if name.startswith("layers") and p.ndim == 2
        ]
        assert {name for name, _ in adamw["params"]} >= {"embed.weight", "layers.0.norm.weight", "layers.3.up.bias"}
        with NearStorageMuon([muon, adamw], lr=0.02, path=path, extent_params=1024, max_grad_norm=1.0) as optimizer:
            if streamed:
                stream_blocks(model, optimizer)
            losses = train(model, optimizer, 4)
            return losses, model.state_dict()

    streamed, plain = run(True, tmp_path / "a"), run(False, tmp_path / "b")
    assert streamed[0] == plain[0]
    assert_same(streamed[1], plain[1])


def test_use_outside_its_block_is_seen(tmp_path):
    model = make()
    with open_optimizer(model, tmp_path / "state") as optimizer:
        stream_blocks(model, optimizer)
        loss = (loss_of(model, 0) + model.layers[0].up.weight.float().sum()).mean()
        loss.backward()
        assert bool(loss.isnan())
        model.layers[0].up.weight.grad.fill_(float("nan"))
        with pytest.raises(NonFiniteError):
            optimizer.step()


def test_backward_behind_a_step_and_errors_in_a_block(tmp_path):
    model = make()
    with open_optimizer(model, tmp_path / "state") as optimizer:
        stream = stream_blocks(model, optimizer)
        x = torch.nn.Parameter(torch.ones(1, WIDTH, dtype=torch.bfloat16))
        early = model.layers[3](x).sum()
        loss_of(model, 1).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="weights must be those of the forward pass"):
            early.backward()
        with pytest.raises(RuntimeError):
            model.layers[2](torch.ones(3, 7))
        assert not stream._running and not +stream._users
        y = model.layers[0].norm(x)
        assert not bool(y.isnan().any()) and is_streamed(model.layers[0].norm.weight), "a part of a block by itself"


def test_models_and_optimizers_that_do_not_fit(tmp_path):
    model = make()
    with NearStorageAdamW(model.head.parameters(), path=tmp_path / "state") as optimizer:
        with pytest.raises(CommandError, match=r"parameter 'layers.0.norm.weight' must be in the optimizer, or frozen"):
            stream_blocks(model, optimizer)
        with pytest.raises(CommandError, match="Linear must have a ModuleList"):
            stream_blocks(torch.nn.Linear(2, 2), optimizer)
        with pytest.raises(CommandError, match="cached_blocks must be at least 1, not 0"):
            stream_blocks(model, optimizer, cached_blocks=0)
        with pytest.raises(CommandError, match="read_ahead must be at least 0, not -1"):
            stream_blocks(model, optimizer, read_ahead=-1)
    with pytest.raises(CommandError, match="optimizer must be a NearStorageOptimizer"):
        stream_blocks(model, torch.optim.SGD(model.parameters()))
    with NearStorageAdamW(model.parameters(), path=tmp_path / "compared", delta_bytes=1 << 20) as optimizer:
        with pytest.raises(CommandError, match="delta_bytes must be 0 for blocks to be streamed"):
            stream_blocks(model, optimizer)
    assert not any(is_streamed(parameter) for parameter in model.parameters())
    with open_optimizer(model, tmp_path / "other") as optimizer:
        stream_blocks(model, optimizer)
        with pytest.raises(CommandError, match=r"must not be streamed already"):
            stream_blocks(model, optimizer)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers(tmp_path, tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    def run(streamed, path):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).bfloat16().train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        with open_optimizer(model, path) as optimizer:
            if streamed:
                stream_blocks(model, optimizer)
            for step in range(3):
                ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict()

    assert_same(run(True, tmp_path / "a"), run(False, tmp_path / "b"))
