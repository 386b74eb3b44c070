"""The stage: what is on its way to flash is readable, in order, and stops at the first error."""

import threading

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import StateError
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.page import PageWrites, page_keys
from nearflash.storage.kv.stage import PageStage

TIMEOUT_S = 30


class SlowFlash(Flash):
    """Writes down what it is asked for; a call ends when it is let."""

    geometry = FlashGeometry(4096, 8, 1, 1, 4)
    concurrent = True

    def __init__(self):
        self.log, self.gate, self.began, self.error = [], threading.Event(), threading.Semaphore(0), None
        self.gate.set()

    def program(self, pages, batch):
        self._do(("program", pages.tolist(), batch.data[:, 0].tolist()))

    def erase(self, block):
        self._do(("erase", block))

    def _do(self, call):
        self.began.release()
        assert self.gate.wait(TIMEOUT_S)
        if self.error:
            error, self.error = self.error, None
            raise error
        self.log.append(call)

    def read(self, pages, expected):
        raise NotImplementedError

    def sync(self):
        """Nothing of it is looked at here; see tests/bench/storage/test_kv_crashes.py."""

    entry = close = read


def batch(values):
    data = np.zeros((len(values), 4096), np.uint8)
    data[:] = np.array(values)[:, None]
    return PageWrites(page_keys(1, 0, 0, values, PageKind.TOKEN), data, np.zeros((len(values), 8, 8), np.uint8))


@pytest.mark.parametrize("background", [False, True])
def test_programs_and_erases_keep_their_order(background):
    flash = SlowFlash()
    stage = PageStage(flash, 4 * 4096, background=background)
    stage.put(np.array([9, 0, 1]), batch([1, 2, 3]))
    stage.erase(3)
    stage.put(np.array([2, 10]), batch([4, 5]))
    stage.flush()
    calls = [call for call in flash.log if call[0] == "program"]
    programmed = [page for _, pages, _ in calls for page in pages]
    assert [page for page in programmed if page < 8] == [0, 1, 2]
    assert [page for page in programmed if page >= 8] == [9, 10]
    assert {page: value for _, pages, values in calls for page, value in zip(pages, values, strict=True)} == {
        9: 1, 0: 2, 1: 3, 2: 4, 10: 5,
    }  # fmt: skip
    at = flash.log.index(("erase", 3))
    assert sum(len(call[1]) for call in flash.log[:at]) == 3
    stage.close()


def test_a_page_staged_again_while_its_block_is_erased_is_found():
    flash = SlowFlash()
    stage = PageStage(flash, 4 * 4096, background=True)
    flash.gate.clear()
    stage.put(np.array([0, 1]), batch([1, 2]))
    assert flash.began.acquire(timeout=TIMEOUT_S)  # half a ring is programmed without being asked for
    stage.erase(0)
    stage.put(np.array([0]), batch([3]))
    slots = stage.find(np.array([0, 1]))
    assert stage.get(slots).data[:, 0].tolist() == [3, 2]
    flash.gate.set()
    assert flash.began.acquire(timeout=TIMEOUT_S)  # the erase: the first program has ended
    slots = stage.find(np.array([0, 1]))
    assert slots[1] == -1 and stage.get(slots[:1]).data[0, 0] == 3
    stage.flush()
    assert stage.find(np.array([0])) == -1
    stage.close()


@pytest.mark.parametrize("background", [False, True])
def test_nothing_follows_an_error(background):
    flash = SlowFlash()
    stage = PageStage(flash, 4 * 4096, background=background)
    stage.put(np.array([0]), batch([1]))
    flash.error = StateError("broken")
    flash.gate.clear()
    threading.Timer(0.05, flash.gate.set).start()
    with pytest.raises(StateError, match="broken"):
        stage.erase(1)
        stage.put(np.array([1, 2]), batch([2, 3]))
        stage.flush()
    for call in (stage.check, stage.flush, lambda: stage.put(np.array([3]), batch([4]))):
        with pytest.raises(StateError, match="broken"):
            call()
    stage.close()
    assert flash.log == []
    assert stage.get(stage.find(np.array([0]))).data[0, 0] == 1
