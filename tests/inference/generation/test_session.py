"""Sessions: what a turn computes and what it finds stored, in one process, in the next, and after a crash."""

import json

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from nearflash.abi.errors import CommandError, StateError, StorageFullError, UnsupportedError
from nearflash.cli.main import main
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.session import Session
from nearflash.inference.setup import open_engine
from nearflash.storage.kv.journal import journal_path
from nearflash.verify.fixtures.forked import ForkedProgram

TURNS = [
    "The committee met in the spring of that year and decided that the old bridge had to be mended. " * 8,
    " Who paid for it, and when was it done?",
    " And what became of the ferry?",
]


@pytest.fixture
def opened(tmp_path, doclm):
    """An engine on the file of the test, whose sequences are kept."""

    def open_(tokens=600, policy=None):
        policy = policy or AttentionPolicy()
        return open_engine(kv_shape(doclm), policy, tokens=tokens, sequences=1, path=tmp_path / "kv", keep=True)

    return open_


def whole(doclm, tokens, new):
    """What transformers' own cache gives after the whole history."""
    ids = torch.tensor([tokens])
    out = doclm.generate(ids, past_key_values=DynamicCache(config=doclm.config), max_new_tokens=new, do_sample=False,
                         pad_token_id=0)  # fmt: skip
    return out[0, len(tokens) :].tolist()


def test_turns_go_on_after_the_engine_was_closed(doclm, tokenizer, opened):
    replies, histories = [], []
    for turn, message in enumerate(TURNS):
        with opened() as engine:
            session = Session(doclm, tokenizer, engine)
            assert len(session.messages) == 2 * turn
            done = session.reply(message, max_new_tokens=6)
            assert done.reused_tokens == (len(histories[-1]) + 5 if turn else 0)
            replies.append(done.tokens[0])
            histories.append(session.tokens[:-6])
            assert done.tokens[0] == whole(doclm, histories[-1], 6)
    assert tokenizer.decode(histories[-1]).count("user:") == 3
    # The same in one go.
    with open_engine(kv_shape(doclm), AttentionPolicy(), tokens=600, sequences=1) as engine:
        with Session(doclm, tokenizer, engine) as session:
            for turn, message in enumerate(TURNS):
                done = session.reply(message, max_new_tokens=6)
                assert done.tokens[0] == replies[turn] and session.tokens[:-6] == histories[turn]
                assert done.reused_tokens == (len(histories[turn - 1]) + 5 if turn else 0)
        assert not engine.lengths


@pytest.mark.full
def test_a_policy_that_reads_less_goes_on_with_the_same_words(doclm, tokenizer, opened):
    """What had been computed by it came out another way when it was computed again by dense attention."""
    policy, turns = AttentionPolicy("sparf-page", score_dims=0.25, top_k=2, local_window=4), [*TURNS, *TURNS[1:]]
    replies = []
    for message in turns:
        with opened(policy=policy) as engine:
            replies.append(Session(doclm, tokenizer, engine).reply(message, max_new_tokens=20).tokens)
            read = engine.counters.flash_bytes
    assert read["token"]
    with open_engine(kv_shape(doclm), policy, tokens=600, sequences=1) as engine:
        with Session(doclm, tokenizer, engine) as session:
            assert [session.reply(message, max_new_tokens=20).tokens for message in turns] == replies


def test_a_text_is_continued_from_what_it_shares(doclm, tokenizer, opened):
    with opened() as engine:
        session = Session(doclm, tokenizer, engine)
        first = session.generate(TURNS[0], max_new_tokens=4)
        again = session.generate(TURNS[0], max_new_tokens=4)
        assert again.tokens == first.tokens and again.reused_tokens == len(session.tokens) - 4 - 2
        other = session.generate(TURNS[0][:200] + " In the autumn", max_new_tokens=4)
        shared = other.reused_tokens
        assert 0 < shared < again.reused_tokens
        assert other.tokens[0] == whole(doclm, session.tokens[:-4], 4)
        fresh = session.generate("Water", max_new_tokens=4)
        assert fresh.reused_tokens == 0 and fresh.tokens[0] == whole(doclm, session.tokens[:-4], 4)
        assert len(engine.lengths) == 1


def test_prompt_lookup_after_a_turn(doclm, tokenizer, opened):
    """transformers gave the model all tokens again, behind those stored: other words, and K and V of other places."""
    with opened() as engine:
        session = Session(doclm, tokenizer, engine)
        for text in (TURNS[0][:200], TURNS[0], TURNS[0] + TURNS[1]):
            found = session.generate(text, max_new_tokens=6, prompt_lookup_num_tokens=3)
            assert found.tokens[0] == whole(doclm, session.tokens[:-6], 6)
            assert session.stored_tokens < len(session.tokens)


def test_the_end_of_a_prompt_attends_to_all_tokens(doclm, tokenizer, opened, monkeypatch):
    """A last token that came alone, as all before it was stored, attended by the policy, and replies were others."""
    policy, shapes = AttentionPolicy("sparf-page", score_dims=0.25, top_k=2, local_window=4), []
    attend = CpuEngine.attend
    monkeypatch.setattr(CpuEngine, "attend", lambda own, layer, sequences, q, *a, **k: (
        shapes.append(q.shape), attend(own, layer, sequences, q, *a, **k))[1])  # fmt: skip
    with opened(policy=policy) as engine:
        session = Session(doclm, tokenizer, engine)
        first = session.generate(TURNS[0], max_new_tokens=8)
        for _ in range(2):
            shapes.clear()
            assert session.generate(TURNS[0], max_new_tokens=8).tokens == first.tokens
            assert shapes[0][2] == 2 and len(shapes[0]) == 5 and len(shapes[-1]) == 4


CHILD = """
import sys
from pathlib import Path
from nearflash.inference import load_model, open_engine
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.session import Session

model, tokenizer = load_model(sys.argv[1])
with open_engine(kv_shape(model), AttentionPolicy(), tokens=600, sequences=1, path=Path(sys.argv[2]), keep=True) as e:
    session = Session(model, tokenizer, e)
    session.reply(sys.argv[3], max_new_tokens=6)
    print("turn", flush=True)
    session.reply(sys.argv[4], max_new_tokens=300, progress=lambda at: print(at.step, flush=True))
"""


def test_after_a_kill_in_the_middle_of_a_turn(doclm, doclm_folder, tokenizer, opened, tmp_path):
    program = ForkedProgram(CHILD, str(doclm_folder), str(tmp_path / "kv"), *TURNS[:2])
    program.wait_for("\n80\n")
    program.kill()
    program.communicate()
    with opened() as engine:
        session = Session(doclm, tokenizer, engine)
        assert len(session.messages) == 2  # the turn that was cut off counts as not said
        group, prompt = engine.store.layout.group_tokens, len(session.tokens)
        assert session.stored_tokens > prompt - group and prompt > group
        done = session.reply(TURNS[1], max_new_tokens=6)
        assert done.reused_tokens >= prompt - group and done.tokens[0] == whole(doclm, session.tokens[:-6], 6)
        assert len(engine.lengths) == 1


def test_a_full_store_and_an_interrupt_leave_what_was_there(doclm, tokenizer, opened):
    with opened(tokens=300) as engine:
        session = Session(doclm, tokenizer, engine)
        session.reply(TURNS[0], max_new_tokens=4)
        messages = list(session.messages)
        with pytest.raises(StorageFullError, match="no room"):
            session.reply(TURNS[0] * 16, max_new_tokens=4)

        def stop(progress):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.reply(TURNS[1], max_new_tokens=9, progress=stop)
        assert session.messages == messages
        done = session.reply(TURNS[1], max_new_tokens=4)
        assert done.reused_tokens > 100 and done.tokens[0] == whole(doclm, session.tokens[:-4], 4)
    with opened(tokens=300) as engine:
        assert Session(doclm, tokenizer, engine).messages[:2] == messages


def test_sessions_of_other_models_and_other_sequences_are_rejected(doclm, tokenizer, opened):
    with opened() as engine:
        Session(doclm, tokenizer, engine).generate("Water", max_new_tokens=2)
    with opened() as engine, torch.no_grad():
        bits = doclm.model.layers[3].mlp.up_proj.weight.view(torch.int32)[5]
        bits[77] ^= 1
        with pytest.raises(StateError, match="its weights are another one's"):
            Session(doclm, tokenizer, engine)
        bits[77] ^= 1
        other = engine.add()
        engine.note(other, engine.notes[min(engine.lengths)])
        with pytest.raises(StateError, match="one sequence, not of 2"):
            Session(doclm, tokenizer, engine)
        engine.note(other, {"tokens": []})
        engine.free(min(engine.lengths))
        with pytest.raises(StateError, match="an object of identity"):
            Session(doclm, tokenizer, engine)
    with pytest.raises(CommandError, match="keep must be False without a path"):
        open_engine(kv_shape(doclm), AttentionPolicy(), tokens=60, sequences=1, keep=True)


def test_layers_that_are_not_on_flash_cannot_be_kept(tokenizer, tmp_path):
    config = Gemma2Config(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                          num_attention_heads=2, num_key_value_heads=1, head_dim=16, sliding_window=16)  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    shape = kv_shape(model)
    with open_engine(shape, AttentionPolicy(), tokens=99, sequences=1, path=tmp_path / "kv", keep=True) as engine:
        with pytest.raises(UnsupportedError, match="full attention in every layer"):
            Session(model, tokenizer, engine)
    with open_engine(shape, AttentionPolicy(), tokens=99, sequences=1) as engine:
        session = Session(model, tokenizer, engine)
        session.reply("Water", max_new_tokens=3)
        tokens = session.reply("And fire?", max_new_tokens=3).tokens[0]
        assert tokens == whole(model, session.tokens[:-3], 3)


def test_prompts_and_options_that_mean_nothing(doclm, tokenizer, opened):
    with opened() as engine:
        session = Session(doclm, tokenizer, engine)
        with pytest.raises(CommandError, match="at least"):
            session.generate("")
        with pytest.raises(CommandError, match="max_new_tokens"):
            session.generate("Water", max_new_tokens=0)
        assert not engine.lengths


class TestCommand:
    def run(self, capsys, folder, tmp_path, *arguments, code=0):
        session = ["--session", str(tmp_path / "talk"), "--max-new-tokens", "3"]
        assert main(["generate", "--model", str(folder), *session, *arguments]) == code
        return capsys.readouterr()

    def test_a_session_goes_on(self, capsys, doclm_folder, tmp_path):
        out, err = self.run(capsys, doclm_folder, tmp_path, TURNS[0])
        assert "session: 0 tokens before" in err and out.startswith(TURNS[0])
        text = out.rstrip("\n")
        assert "K and V of 0 of them" in err
        out, err = self.run(capsys, doclm_folder, tmp_path, text)
        assert out.startswith(text) and "K and V of 0 of them" not in err
        assert main(["kv", "status", str(tmp_path / "talk")]) == 0
        assert "sequence 0: " in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--path", "kv"], "session must be given without path"),
            (["--device", "model:attend-tiny"], "session must be given without path"),
            (["--mini-batches", "2"], "session must be of one prompt"),
        ],
    )
    def test_options_that_do_not_go_with_it(self, capsys, doclm_folder, tmp_path, options, message):
        assert message in self.run(capsys, doclm_folder, tmp_path, "Water", *options, code=2).err

    def test_a_file_of_something_else(self, capsys, doclm_folder, tmp_path):
        (tmp_path / "talk").write_text("my notes")
        assert "superblock" in self.run(capsys, doclm_folder, tmp_path, "Water", code=2).err
        assert (tmp_path / "talk").read_text() == "my notes"

    def test_a_session_of_another_model(self, capsys, doclm_folder, tmp_path):
        self.run(capsys, doclm_folder, tmp_path, "Water")
        path = journal_path(tmp_path / "talk")
        lines = path.read_text().splitlines()
        assert any("tokens" in json.loads(line[9:]).get("info", {}) for line in lines)
        path.unlink()
        assert "readable journal" in self.run(capsys, doclm_folder, tmp_path, "Water", code=2).err
