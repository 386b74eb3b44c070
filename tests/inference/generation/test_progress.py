"""How far a generation is: rates, the time left, bytes by token, from a clock that the test turns."""

import io

import pytest
import torch

from nearflash.inference import progress
from nearflash.inference.commands.console import report_progress
from nearflash.inference.progress import GenerationClock, GenerationProgress, ProgressCallback, TextOut


@pytest.fixture
def now(monkeypatch):
    """The time, as a list of one."""
    time = [100.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: time[0])
    return time


def clock(engine, sequences=2, mini_batches=1, tokens=5, report=None):
    return GenerationClock(
        engine, engine.counters - engine.counters, sequences, mini_batches, tokens, report, start=100.0
    )


def test_rates_begin_with_the_first_token(engine, now):
    told = []
    timer = clock(engine, report=told.append)
    for second in (103, 104, 105):  # 3 s of prefill, then 1 s a step of two sequences
        now[0] = second
        engine.counters.count("token", 600)
        timer.tick(0)
    assert [one.step for one in told] == [1, 2, 3] and [one.tokens_per_s for one in told] == [0, 2, 2]
    assert [one.remaining_s for one in told] == [0, 3, 2]
    assert told[-1].flash_bytes_per_token == 3 * 600 / 4
    assert timer.prefill_s == 3 and timer.decode_s == 2


def test_mini_batches_are_as_far_as_the_one_behind_most(engine, now):
    told = []
    timer = clock(engine, mini_batches=2, report=told.append)
    for part, second in ((0, 101), (0, 102), (1, 104), (1, 106)):
        now[0] = second
        timer.tick(part)
    assert [one.step for one in told] == [1, 2]  # nothing is told before each has a token
    assert timer.prefill_s == 4 and timer.decode_s == 2 and told[-1].tokens_per_s == 1


def test_a_generation_that_never_began_took_no_time(engine, now):
    timer = clock(engine)
    now[0] = 200
    assert timer.prefill_s == 0 and timer.decode_s == 0


def test_a_stopped_clock_stops_all_sequences(engine, now):
    timer = clock(engine)
    tick, ids = ProgressCallback(timer, 0), torch.zeros(3, 7, dtype=torch.long)
    assert tick(ids, None).tolist() == [False] * 3
    timer.stopped = True
    assert tick(ids, None).tolist() == [True] * 3 and timer.steps == {0: 2}


def test_words_come_whole_and_the_prompt_does_not(tokenizer):
    out = io.StringIO()
    prompt, reply = (tokenizer(text, return_tensors="pt").input_ids for text in ("Water flows", " down the valley"))
    writer = TextOut(tokenizer, out)
    writer.put(prompt)
    seen = []
    for token in reply[0]:
        writer.put(token[None])
        seen.append(out.getvalue())
    writer.end()
    text = tokenizer.decode(reply[0])
    assert out.getvalue() == f"{text}\n"
    assert all(text.startswith(part) and part.split() == text.split()[: len(part.split())] for part in seen)


def test_a_file_gets_every_sixteenth_step_and_the_ends(capsys):
    for step in range(1, 41):
        report_progress(GenerationProgress(step, 40, 2.5, 1e6, 40.0 - step))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", "16/40", "32/40", "40/40"]
    assert lines[1] == "token 16/40  2.5 tokens/s  1.000 MB of flash a token  24 s left"
