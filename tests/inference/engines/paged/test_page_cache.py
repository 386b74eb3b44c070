"""Groups in memory are those that were read; what is in use is not thrown out."""

import numpy as np
import pytest

from nearflash.inference.engines.paged.page_cache import PageCache

ELEMENTS = 8


class Flash:
    """Groups whose elements say which ones they are."""

    def __init__(self, memory):
        self.memory, self.read = memory, []

    def take(self, sequence, layer, wanted):
        heads, groups = (np.array(x, np.int64) for x in zip(*wanted, strict=True))
        want = np.stack([np.arange(ELEMENTS) + 500 * sequence + 100 * layer + 10 * h + g for h, g in wanted])

        self.memory.begin(layer, [sequence])
        before, found = len(self.read), self.memory.find(sequence, layer, heads, groups)
        self.read += [(sequence, layer, *wanted[place]) for place in found.lacking]
        new = want[found.lacking].astype(np.float16)
        places = self.memory.fill(found, new)
        found = [self.memory.data[place] if place >= 0 else new[-1 - place] for place in places]
        np.testing.assert_array_equal(np.array(found), want)
        return len(self.read) - before


def test_random_choices_are_what_was_read():
    """Three sequences of three layers, with room for a fifth of them; one is freed, and its number used again."""
    rng = np.random.default_rng(1)
    memory = PageCache(40 * 2 * ELEMENTS, 2 * ELEMENTS)
    flash, asked = Flash(memory), 0
    for turn in range(300):
        for sequence in range(3):
            for layer in range(3):
                count = rng.integers(1, 8)
                chosen = rng.choice(2 * (6 + turn // 100), count, replace=False)
                flash.take(sequence, layer, [divmod(int(each), 6 + turn // 100) for each in chosen])
                asked += count
        if turn % 37 == 0:
            before = memory.size_bytes
            memory.drop(turn % 3)
            assert memory.size_bytes < before
    assert memory.size_bytes == 40 * 2 * ELEMENTS and 0.5 * asked < len(flash.read) < 0.95 * asked


@pytest.mark.parametrize("places, reads", [(4, 6), (10, 0), (0, 10)])
def test_groups_in_use_stay_though_more_are_asked_for(places, reads):
    """Ten groups in a circle, for whom the least recently used place would always be the next one to be asked for."""
    flash = Flash(PageCache(places * 2 * ELEMENTS, 2 * ELEMENTS))
    for turn in range(5):
        found = sum(flash.take(0, layer, [(0, 1), (1, 0)]) for layer in range(5))
        assert found == (reads if turn else 10)


def test_the_longest_unused_goes_first():
    flash = Flash(PageCache(4 * 2 * ELEMENTS, 2 * ELEMENTS))
    flash.take(0, 0, [(0, 0), (0, 1), (0, 2), (0, 3)])
    flash.take(0, 0, [(0, 0), (0, 2), (0, 3)])
    flash.take(0, 0, [(0, 0), (0, 2)])
    assert flash.take(0, 0, [(0, 0), (0, 4), (0, 5)]) == 2  # in place of 1 and 3
    assert flash.take(0, 0, [(0, 2), (0, 4), (0, 5)]) == 0
    assert flash.take(0, 0, [(0, 1)]) == 1


def test_what_was_found_and_never_filled_changes_nothing():
    """As after a read that failed."""
    flash = Flash(PageCache(4 * 2 * ELEMENTS, 2 * ELEMENTS))
    flash.take(0, 0, [(0, 0)])
    flash.memory.begin(0, [0])
    found = flash.memory.find(0, 0, np.array([0, 0]), np.array([0, 1]))
    assert found.lacking.tolist() == [1] and found.places[0] >= 0
    assert flash.take(0, 0, [(0, 0), (0, 1)]) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_parts_of_a_turn_leave_one_another_alone(order):
    """Groups of another part count as in use until the turn is over, in whichever order threads ask for them: a part
    that came earlier than in the turn before had thrown out those of the next one."""
    flash = Flash(PageCache(4 * 2 * ELEMENTS, 2 * ELEMENTS))
    heads, lacking = np.array([0, 0]), []
    for turn in range(4):
        flash.memory.begin(0, [0, 1])
        for part in (0, 1, 2) if turn % 2 else order:
            found = flash.memory.find(part % 2, 0, heads, 2 * part + heads + [0, 1])
            flash.memory.fill(found, np.zeros((len(found.lacking), ELEMENTS), np.float16))
            lacking.append(len(found.lacking))
    assert lacking[:3] == [2, 2, 2] and [sum(lacking[at : at + 3]) for at in (3, 6, 9)] == [2, 2, 2]


def test_turns_of_other_sequences_do_not_end_ones_own():
    """As of two mini-batches: what the other did since is no reason to give up a place."""
    flash = Flash(PageCache(4 * 2 * ELEMENTS, 2 * ELEMENTS))
    for turn in range(3):
        for layer in range(2):
            for sequence in range(2):
                assert flash.take(sequence, layer, [(0, turn)] if sequence and layer else [(0, 0)]) == (
                    1 if not turn or (sequence and layer) else 0
                )
