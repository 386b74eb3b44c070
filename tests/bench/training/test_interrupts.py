"""The bench `interrupts`, small: what an interrupt leaves behind is a step, whole."""

import pytest

from nearflash.bench.training import interrupts
from nearflash.training.step.parameters import FlatParameters


@pytest.mark.full
def test_interrupts_leave_whole_steps():
    (row,) = interrupts.run(60)
    assert row["interrupts"] >= 60 and row["disagreements"] == 0
    assert all(row["by_kind"].values()) and row["by_phase"]["step"]


def test_a_store_and_tensors_apart_are_noticed(monkeypatch, capsys):
    """As if an interrupt had come before the last tensor, which gets neither new values nor a new fingerprint."""
    real, publish = FlatParameters.stage, FlatParameters.publish

    def stage(flat, start, stop, *given, **options):
        real(flat, start, min(stop, flat.entries[-1].start), *given, **options)

    monkeypatch.setattr(FlatParameters, "stage", stage)
    monkeypatch.setattr(FlatParameters, "publish", lambda flat, tensors: publish(flat, list(tensors)[:-1]))
    (row,) = interrupts.run(3)
    assert row["disagreements"] and "is not at its step 1" in capsys.readouterr().err
