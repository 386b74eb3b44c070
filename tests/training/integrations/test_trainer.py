"""Trainer: like torch's AdamW, clipped once, and a resumed run is the run that was not interrupted, to the bit."""

import warnings

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from nearflash.abi.errors import CommandError, StateError
from nearflash.training import NearStorageAdamW, NearStorageLion, NearStorageSGD
from nearflash.training.integrations.checkpoints import FOLDER, restore, save
from nearflash.training.integrations.trainer import Snapshots, trainer_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
OPTIONS = {"extent_params": 1024, "device": "host:update-smartssd"}


@pytest.fixture
def arguments(tmp_path):
    def make(name="out", **changes):
        options = {
            "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.3, "lr_scheduler_type": "linear",
            "warmup_steps": 2, "max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
            "seed": 1, "dataloader_pin_memory": False,
        }  # fmt: skip
        return TrainingArguments(output_dir=str(tmp_path / name), **(options | changes))

    return make


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def close(trainer):
    getattr(trainer.optimizer, "optimizer", trainer.optimizer).close()


def test_like_torch_with_clipping_schedule_and_accumulation(make_model, rows, values, arguments, tmp_path):
    theirs = make_model()
    other = Trainer(theirs, arguments("theirs", optim="adamw_torch"), train_dataset=rows)
    other.train()
    mine, chosen = make_model(), arguments("mine")
    trainer = Trainer(
        mine, chosen, train_dataset=rows,
        optimizer_cls_and_kwargs=trainer_optimizer(chosen, path=tmp_path / "state", **OPTIONS),
    )  # fmt: skip
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, NearStorageAdamW) and optimizer.steps == 6 and chosen.max_grad_norm == 0
    assert optimizer.report.grad_norm > 0.3, "otherwise nothing was clipped"
    assert losses(trainer) == pytest.approx(losses(other), rel=1e-4)
    for one, two in zip(values(mine), values(theirs), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-5)
    close(trainer)


@pytest.mark.full
def test_optimizers_argument_clips_through_the_gradients(make_model, rows, values, arguments, tmp_path):
    """Trainer clips p.grad: the same as clipping by the optimizer, but for rounding."""
    results = []
    for name in ("given", "chosen"):
        model, chosen = make_model(), arguments(name, weight_decay=0.0)
        if name == "given":
            optimizer = NearStorageAdamW(
                model.parameters(), path=tmp_path / f"{name}.state", lr=1e-2, weight_decay=0.0, **OPTIONS
            )
            trainer = Trainer(model, chosen, train_dataset=rows, optimizers=(optimizer, None))
        else:
            kind = trainer_optimizer(chosen, path=tmp_path / f"{name}.state", **OPTIONS)
            trainer = Trainer(model, chosen, train_dataset=rows, optimizer_cls_and_kwargs=kind)
        trainer.train()
        results.append((values(model), losses(trainer)))
        close(trainer)
    (given, given_losses), (chosen, chosen_losses) = results
    assert given_losses == pytest.approx(chosen_losses, rel=1e-4)
    assert all(torch.allclose(one, two, rtol=1e-4, atol=1e-5) for one, two in zip(given, chosen, strict=True))


def run(model, rows, arguments, path, checkpoint=None, **options):
    optimizer = trainer_optimizer(arguments, path=path, checkpoint=checkpoint, **OPTIONS, **options)
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Snapshots()], optimizer_cls_and_kwargs=optimizer)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    close(trainer)
    return trainer


@pytest.mark.full
@pytest.mark.parametrize("dtype, name", [(torch.float32, None), (torch.bfloat16, "bf16")])
def test_resume_from_a_checkpoint_before_the_state(make_model, rows, values, arguments, tmp_path, dtype, name):
    """The state is at step 6; the checkpoint and its snapshot are of step 3."""
    whole, resumed = make_model(dtype), make_model(dtype)
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = run(whole, rows, arguments("a", **saving), tmp_path / "state", param_dtype=name)
    checkpoint = tmp_path / "a" / "checkpoint-3"
    assert [file.name for file in (checkpoint / FOLDER).iterdir()] == ["state"]
    second = run(resumed, rows, arguments("b"), tmp_path / "state", checkpoint, param_dtype=name)
    assert losses(second)[-3:] == losses(first)[-3:]
    assert all(torch.equal(one, two) for one, two in zip(values(whole), values(resumed), strict=True))


@pytest.mark.full
def test_a_second_run_starts_from_its_own_model(make_model, rows, values, arguments, tmp_path):
    """Once it got the first one's weights and moments, as the path existed, and no clipping, as that had moved."""
    chosen, results = arguments(), []
    for number in range(3):
        model = make_model()
        optimizer = trainer_optimizer(chosen, path=tmp_path / "state", **OPTIONS)
        trainer = Trainer(model, chosen, train_dataset=rows, optimizer_cls_and_kwargs=optimizer)
        if number:
            with pytest.warns(
                UserWarning, match=r"state held the state of an earlier run, which is .*state\.previous now"
            ):
                trainer.train()
        else:
            trainer.train()
        results.append(values(model))
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))
    close(trainer)
    assert sorted(path.name for path in tmp_path.glob("state*")) == ["state", "state.previous"]
    with NearStorageAdamW(groups(make_model()), path=tmp_path / "state.previous", resume=True, **OPTIONS) as earlier:
        assert earlier.steps == 6


@pytest.mark.full
@pytest.mark.parametrize("step", [3, 6])
def test_resume_from_a_checkpoint_that_only_train_is_given(make_model, rows, values, arguments, tmp_path, step):
    """Of the snapshot in an earlier checkpoint, or of the state itself where that is at the checkpoint's step."""
    whole, resumed = make_model(), make_model()
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
    run(whole, rows, arguments("whole", **saving), tmp_path / "whole.state")
    stopping = Stop(6)
    first = arguments("a", **saving)
    optimizer = trainer_optimizer(first, path=tmp_path / "state", **OPTIONS)
    callbacks = [stopping] + [Snapshots()] * (step == 3)
    trainer = Trainer(make_model(), first, train_dataset=rows, callbacks=callbacks, optimizer_cls_and_kwargs=optimizer)
    trainer.train()
    second = arguments("a", **saving)
    optimizer = trainer_optimizer(second, path=tmp_path / "state", **OPTIONS)
    trainer = Trainer(resumed, second, train_dataset=rows, callbacks=[Snapshots()], optimizer_cls_and_kwargs=optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "state held the state of an earlier run")
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
    assert trainer.optimizer.optimizer.steps == 9
    close(trainer)
    assert all(torch.equal(one, two) for one, two in zip(values(whole), values(resumed), strict=True))


class Stop(TrainerCallback):
    """As a run that was stopped after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.full
def test_what_is_no_state_is_not_set_aside(make_model, rows, arguments, tmp_path):
    (tmp_path / "state").write_text("a thesis")
    optimizer = trainer_optimizer(arguments(), path=tmp_path / "state", **OPTIONS)
    with pytest.raises(StateError):
        Trainer(make_model(), arguments(), train_dataset=rows, optimizer_cls_and_kwargs=optimizer).train()
    assert (tmp_path / "state").read_text() == "a thesis" and not (tmp_path / "state.previous").exists()


def test_optim_chooses_the_class(arguments, tmp_path):
    """Once every name trained with AdamW."""
    kind, options = trainer_optimizer(arguments(optim="sgd"), path=tmp_path / "state")
    assert issubclass(kind, NearStorageSGD) and "betas" not in options
    kind, options = trainer_optimizer(arguments(optim="lion_32bit", adam_beta2=0.95), path=tmp_path / "state")
    assert issubclass(kind, NearStorageLion) and options["betas"] == (0.9, 0.95)
    with pytest.raises(CommandError, match=r"optim must be one of adamw_torch, .*, not 'adafactor'"):
        trainer_optimizer(arguments(optim="adafactor"), path=tmp_path / "state")
    kind, _ = trainer_optimizer(arguments(optim="adafactor"), path=tmp_path / "state", kind=NearStorageAdamW)
    assert issubclass(kind, NearStorageAdamW)


def test_saving_into_the_same_checkpoint_again(tmp_path):
    """As a run does that resumes from an earlier checkpoint: once an error, in the middle of training."""
    tensor = torch.nn.Parameter(torch.ones(2000))
    paths = [tmp_path / "a.state", tmp_path / "b.state"]
    with NearStorageAdamW([tensor], path=paths, device=["host", "host"], extent_params=1024) as two:
        save(two, tmp_path / "checkpoint")
    with NearStorageAdamW([tensor], path=tmp_path / "a.state.1", extent_params=1024) as one:
        for step in range(1, 3):
            tensor.grad = torch.ones_like(tensor)
            one.step()
            save(one, tmp_path / "checkpoint")
            assert restore(tmp_path / "checkpoint", tmp_path / "restored") == step
        with pytest.raises(StateError, match="cannot be"):
            save(one, tmp_path / "a.state" / "checkpoint")
    assert [path.name for path in tmp_path.rglob("checkpoint/**/*")] == ["nearflash", "a.state.1"]
    with pytest.raises(StateError, match="must be a folder that exists"):
        restore(tmp_path / "checkpoint", tmp_path / "none" / "state")


def test_killed_while_a_checkpoint_is_saved_again(tmp_path):
    """Between the names of two files: the second one's new content has the name that it gets when it is opened."""
    tensor = torch.nn.Parameter(torch.ones(2000))
    paths = [tmp_path / "a.state", tmp_path / "b.state"]
    with NearStorageAdamW([tensor], path=paths, device=["host", "host"], extent_params=1024) as two:
        _, second = save(two, tmp_path / "checkpoint")
        before = second.read_bytes()
        tensor.grad = torch.ones_like(tensor)
        two.step()
        save(two, tmp_path / "checkpoint")
    second.rename(second.with_name("b.state.partial"))
    second.write_bytes(before)
    assert restore(tmp_path / "checkpoint", [tmp_path / "c", tmp_path / "d"], devices=2) == 1


@pytest.mark.full
def test_resume_with_an_optimizer_that_exists_already(make_model, rows, values, arguments, tmp_path):
    """The Trainer loads the model's checkpoint behind the optimizer's back, and it is what the store has."""
    model, saving = make_model(), {"save_strategy": "steps", "save_steps": 3}
    run(model, rows, arguments("a", **saving), tmp_path / "state", weight_decay=0.0)
    resumed = make_model()
    assert restore(tmp_path / "a" / "checkpoint-3", tmp_path / "state") == 3
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600, "a restored state is the user's alone"
    chosen = arguments("b")
    optimizer = NearStorageAdamW(
        groups(resumed), path=tmp_path / "state", lr=1e-2, resume=True, max_grad_norm=0.3, **OPTIONS
    )
    chosen.max_grad_norm = 0.0
    trainer = Trainer(resumed, chosen, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert optimizer.steps == 6
    assert all(torch.equal(one, two) for one, two in zip(values(model), values(resumed), strict=True))
    optimizer.close()


def groups(model):
    """As the Trainer makes them."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if ("norm" in name) is not decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]


def test_a_checkpoint_without_a_snapshot(arguments, tmp_path):
    with pytest.raises(StateError, match="must hold a snapshot of 1 files, not of 0"):
        trainer_optimizer(arguments(), path=tmp_path / "state", checkpoint=tmp_path / "none")
