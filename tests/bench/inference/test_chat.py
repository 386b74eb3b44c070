"""The bench of chats on a small model: its cases go on where they should, and say the same."""

from pathlib import Path

import pytest

from nearflash.abi.errors import CommandError
from nearflash.bench.inference import chat
from nearflash.inference.models import model_positions

DOCLM = Path(__file__).parents[2] / "data" / "doclm-7m"


@pytest.mark.full
def test_cases_go_on_with_what_is_stored(monkeypatch, tmp_path):
    monkeypatch.setattr(chat, "QUESTIONS", chat.QUESTIONS[:6])
    history, *rows, last = chat.run(str(DOCLM), tokens=300, new_tokens=3, attention="dense", path=tmp_path)
    assert (
        history["case"] == "history" and 280 < history["tokens"] < 340 and history["policy"].startswith("policy: dense")
    )
    turns = [(row["case"], row["turn"]) for row in rows]
    assert turns == [
        *(("stored", turn) for turn in range(1, 7)), *(("reopened", turn) for turn in range(1, 7)), ("killed", 5),
        ("killed", 6), ("computed", 1), ("computed", 6),
    ]  # fmt: skip
    for row in rows:
        assert row["reused_tokens"] >= row["prompt_tokens"] - 64 or row["case"] == "computed"
        assert row["time_to_first_token_s"] > 0 and row["reply_tokens"] <= 3
    assert set(last["speedup_by_case"]) == {"stored", "reopened", "killed"} and last["after_kill"] > 0
    assert last["same_tokens"]["stored"] == 1 and last["same_tokens"]["reopened"] == last["same_tokens"]["killed"] == 1
    assert not list(tmp_path.iterdir())


def test_positions_are_scaled_for_a_room_beyond_them():
    plain, _ = chat._Chat(str(DOCLM), 500, 4, True).model()
    positions = model_positions(plain.config)
    longer, _ = chat._Chat(str(DOCLM), 2 * positions + 1, 4, True).model()
    assert longer.config.rope_parameters["rope_type"] == "yarn" and longer.config.rope_parameters["factor"] == 3
    own, scaled = plain.model.rotary_emb.inv_freq, longer.model.rotary_emb.inv_freq
    assert own[0] == scaled[0] and scaled[-1] < own[-1]


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(CommandError, match=r"folder with a config\.json"):
        next(chat.run(str(tmp_path)))
