"""Power lost at every point of a session's second turn: what goes on from there is what a session without it says."""

import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import StateError, StorageFullError
from nearflash.cli.main import main
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.session import Session
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore, open_kept_store
from nearflash.storage.kv.journal import SequenceJournal, journal_path
from nearflash.storage.kv.sequence import Tags
from nearflash.storage.kv.stage import PageStage

SHAPE = KvShape(layers=6, kv_heads=2, dim=128)
LAYOUT = KvLayout(8, True, 64, IndexFormat.INT4, 4096)
TURNS = ["Once there was a fox and a hen, and they met at the old mill. " * 2, " What did the fox say to it?"]


@pytest.fixture
def model(doclm):
    """A trained one, whose words do not turn on the last bit of K and V."""
    return doclm


@pytest.fixture
def opened(tmp_path):
    def open_(name="kv", blocks=14):
        store = open_kept_store(tmp_path / name, SHAPE, LAYOUT, FlashGeometry(4096, 64, 1, 1, blocks), direct=False)
        return CpuEngine(store, AttentionPolicy(), first_head=0, name="cpu")

    open_.path = tmp_path / "kv"
    return open_


class Powers:
    """The files as they may be after a power cut at each program of pages and each line of the journal."""

    def __init__(self, path, monkeypatch):
        self.path, self.images = path, []
        program, sync = FileFlash.program, SequenceJournal.sync
        self._pages = self._durable = b""

        def programmed(flash, pages, batch):
            program(flash, pages, batch)
            self.take(path.read_bytes())

        def synced(journal):
            sync(journal)
            self._durable = journal_path(path).read_bytes()

        monkeypatch.setattr(FileFlash, "program", programmed)

        def put(journal, body, real=SequenceJournal._put):
            real(journal, body)
            self.take(path.read_bytes())

        monkeypatch.setattr(SequenceJournal, "sync", synced)
        monkeypatch.setattr(SequenceJournal, "_put", put)

    def start(self):
        self.images.clear()
        self._durable = journal_path(self.path).read_bytes()

    def take(self, pages):
        """With these pages: every end of the journal that is possible."""
        journal, start = journal_path(self.path).read_bytes(), len(self._durable)
        ends = [start, *(at + 1 for at in range(start, len(journal)) if journal[at : at + 1] == b"\n")]
        self.images += [(pages, journal[:end]) for end in dict.fromkeys(ends)]


def reply(model, tokenizer, engine, turn):
    session = Session(model, tokenizer, engine)
    done = session.generate(turn, max_new_tokens=9)
    return done.tokens[0], done.reused_tokens


def lives(model, tokenizer, opened, monkeypatch):
    """Images of the second turn, which shares a part of the first one's text."""
    first, second = TURNS[0] + TURNS[1], TURNS[0][:-20] + TURNS[1] * 3
    with monkeypatch.context() as patch:
        powers = Powers(opened.path, patch)
        with opened() as engine:
            session = Session(model, tokenizer, engine)
            session.generate(first, max_new_tokens=9)
            powers.start()
            session.generate(second, max_new_tokens=9)
    return powers.images, first, second


def outcomes(model, tokenizer, opened, images, texts):
    """Of each image, with a text in turn: says what a session says that computes everything, tokens used again."""
    want = []
    for text in texts:
        with opened("fresh") as engine:
            want.append(reply(model, tokenizer, engine, text)[0])
    for number, (pages, journal) in enumerate(images):
        opened.path.write_bytes(pages)
        journal_path(opened.path).write_bytes(journal)
        with opened() as engine:
            got, reused = reply(model, tokenizer, engine, texts[number % len(texts)])
        yield got == want[number % len(texts)], reused


def test_what_goes_on_after_a_power_cut_says_the_same(model, tokenizer, opened, monkeypatch):
    images, first, second = lives(model, tokenizer, opened, monkeypatch)
    same, reused = zip(*outcomes(model, tokenizer, opened, images[1::3], [first, second]), strict=True)
    assert len(same) >= 5 and all(same) and sum(reused) > 20 * len(same)


@pytest.mark.full
def test_pages_ahead_of_the_journal_show(model, tokenizer, opened, monkeypatch):
    """The control: K and V of the second text were served for tokens of the first.

    Either is enough against that: the journal ahead of the pages, or tags of their own for what comes after a cut.
    """
    init = PageStage.__init__
    with monkeypatch.context() as patch:
        patch.setattr(Tags, "then", lambda own, start, number: own)
        patch.setattr(PageStage, "__init__", lambda own, *a, **k: init(own, *a, **{**k, "ahead": lambda: None}))
        images, first, _ = lives(model, tokenizer, opened, monkeypatch)
    assert not all(same for same, _ in outcomes(model, tokenizer, opened, images[::-1], [first]))


def test_a_text_that_shares_nothing_takes_the_place_of_the_other_at_once(model, tokenizer, opened, monkeypatch):
    """The sequence was freed before the new one had its note: a power cut in between forgot the conversation."""
    seen = []
    with opened() as engine:
        Session(model, tokenizer, engine).reply(TURNS[0], max_new_tokens=3)
    with opened() as engine:
        session = Session(model, tokenizer, engine)
        put = SequenceJournal._put
        monkeypatch.setattr(SequenceJournal, "_put", lambda own, body: (
            put(own, body), seen.append([one for one in own.entries.values() if one.info])))  # fmt: skip
        session.generate("Water is wet", max_new_tokens=3)
        assert len(engine.lengths) == 1
    assert len(seen) > 3 and all(len(noted) == 1 for noted in seen)


@pytest.mark.parametrize("failing", [0, 3, *(pytest.param(number, marks=pytest.mark.full) for number in (1, 2, 4, 5))])
def test_a_journal_that_is_full_for_a_moment_mixes_no_texts(model, tokenizer, opened, monkeypatch, failing):
    """A crop that failed left a cache that was shorter than its sequence: what followed came behind other tokens."""
    first, second, third = TURNS[0] + TURNS[1], TURNS[0][:-20] + TURNS[1] * 3, TURNS[0][:-40] + "and went home."
    with opened("fresh") as engine:
        want = reply(model, tokenizer, engine, third)[0]
    with opened() as engine:
        session = Session(model, tokenizer, engine)
        session.reply(first, max_new_tokens=3)
        messages, calls = list(session.messages), iter(range(99))
        put = SequenceJournal._put

        def full(own, body):
            if next(calls) == failing:
                raise StateError("no room")
            put(own, body)

        monkeypatch.setattr(SequenceJournal, "_put", full)
        try:
            session.reply(second, max_new_tokens=9)
        except StateError:
            assert session.messages == messages
        monkeypatch.undo()
        assert session.generate(third, max_new_tokens=9).tokens[0] == want
    with opened() as engine:
        assert reply(model, tokenizer, engine, third)[0] == want


def test_a_reply_whose_last_tokens_have_no_room_is_given(model, tokenizer, opened, monkeypatch):
    """The turn is complete, and noted: they are computed again."""

    def full(store):
        raise StorageFullError("no room")

    with opened() as engine:
        session = Session(model, tokenizer, engine)
        with monkeypatch.context() as patch:
            patch.setattr(KvStore, "_keep_partial_groups", full)
            done = session.reply(TURNS[0], max_new_tokens=5)
        assert len(done.tokens[0]) == 5 and len(session.messages) == 2


def test_a_session_given_as_a_plain_file_of_pages_stays_as_it_is(model, tokenizer, opened, tmp_path, capsys):
    """`generate --path talk.kv` emptied it."""
    with opened() as engine:
        Session(model, tokenizer, engine).reply(TURNS[0], max_new_tokens=2)
    files = opened.path, journal_path(opened.path)
    before = [file.read_bytes() for file in files]
    for file in files:
        command = ["generate", "--model", tokenizer.name_or_path, "--path", str(file), "--max-new-tokens", "2", "Water"]
        assert main(command) != 0
        assert str(file) in capsys.readouterr().err
        assert [one.read_bytes() for one in files] == before
    with opened() as engine:
        assert len(Session(model, tokenizer, engine).messages) == 2
