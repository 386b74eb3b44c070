import io

import pytest
import torch
from transformers import DynamicCache

from nearflash.inference.examples import chat, summarise
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.session import Session

SENTENCE = "The committee met in the spring of that year and decided that the old bridge had to be mended. "


@pytest.mark.full
def test_documents_are_summarised_from_a_part_of_their_pages(doclm, tokenizer):
    documents = [SENTENCE * 50, "Water is wet. " * 9, "A short note."]
    sparse = summarise.summarise(doclm, tokenizer, documents, max_new_tokens=4)
    dense = summarise.summarise(doclm, tokenizer, documents, max_new_tokens=4, policy=AttentionPolicy())
    assert [len(tokens) for tokens in sparse.tokens] == [4, 4, 4]
    assert sparse.flash_bytes_per_token < 0.8 * dense.flash_bytes_per_token


def test_summarise_prints_each_file(capsys, tmp_path, doclm_folder):
    (tmp_path / "note.txt").write_text("A short note.")
    assert summarise.main(["--model", str(doclm_folder), "--max-new-tokens", "2", str(tmp_path / "note.txt")]) == 0
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'note.txt'}: " in out and "MB of flash a token" in err


def test_a_later_turn_gives_what_the_whole_history_gives(doclm, tokenizer, engine):
    with Session(doclm, tokenizer, engine) as conversation:
        conversation.reply(SENTENCE * 3, max_new_tokens=4)
        stored = engine.kv(1, 0)[0].shape[1]
        assert stored == len(conversation.tokens) - 1
        conversation.reply(" What did they decide?", max_new_tokens=5)
        history, reply = torch.tensor([conversation.tokens[:-5]]), conversation.tokens[-5:]
    own = doclm.generate(
        history, past_key_values=DynamicCache(config=doclm.config), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert own[0, history.shape[1] :].tolist() == reply
    text = tokenizer.decode(history[0])
    assert text.count("user:") == 2 and text.endswith("user: What did they decide?\nassistant:")
    assert not engine.stored


def test_chat_answers_each_line(capsys, monkeypatch, doclm_folder):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAnd then?\n"))
    reply = Session.reply
    monkeypatch.setattr(Session, "reply", lambda self, line, **options: reply(self, line, max_new_tokens=3))
    assert chat.main(["--model", str(doclm_folder), "--tokens", "64"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No tokenizer threads beside those of pytest."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
