"""Rows of the accuracy bench: deltas and their errors, bytes with and without the tail, what is skipped or refused."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.inference.bench.accuracy import _delta, run
from nearflash.inference.bench.recommended import MODES, recommended, sweep
from nearflash.inference.bench.subjects import MODELS_VARIABLE, SUBJECTS, subject


def test_delta_is_of_the_mean_losses():
    delta, error = _delta(np.array([1.01, 2.06]), np.array([1.0, 2.0]))
    assert delta == pytest.approx(100 * (3.07 / 3 - 1))
    assert error == pytest.approx(1.0)  # 1 % and 3 % without the one or the other
    assert _delta(np.array([1.02]), np.array([1.0]))[1] is None
    assert _delta(np.array([2.02, 1.01]), np.array([2.0, 1.0]))[1] == pytest.approx(0)


def test_rows_are_skipped_without_models(monkeypatch):
    monkeypatch.delenv(MODELS_VARIABLE, raising=False)
    rows = list(run(list(SUBJECTS)))
    assert [row["model"] for row in rows] == list(SUBJECTS) and all(MODELS_VARIABLE in row["skipped"] for row in rows)


def test_other_names_are_refused(tmp_path):
    with pytest.raises(CommandError, match=r"parts must be of SmolLM2-135M-Instruct, doclm-30m, retrieval, not gpt"):
        list(run(["gpt"]))
    with pytest.raises(CommandError, match=r"mode must be one of dense, sparq, .*, local, not 'flat'"):
        list(run(mode="flat"))
    with pytest.raises(CommandError, match="model must be one of SmolLM2-135M-Instruct, doclm-30m, not 'gpt'"):
        subject("gpt", tmp_path)


@pytest.mark.parametrize("model", SUBJECTS)
def test_every_mode_has_a_setting(model):
    assert [recommended(model, mode).mode for mode in MODES] == [str(mode) for mode in MODES]
    assert {setting.mode for setting in sweep(model)} == set(MODES) - {"dense", "sparq"}
