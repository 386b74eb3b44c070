"""Lines and lanes of entries for every size of a token group, and of tokens."""

import random

import pytest

from nearflash.gateware.attention.select.address import EntryAddress


@pytest.mark.parametrize("group_tokens", range(4, 68, 4))
def test_equals_the_definition(clocked, group_tokens):
    rng, lines, taken = random.Random(group_tokens), 1 << 16, group_tokens % 8 == 0
    rows, bases = [], [lines - 500, 12345] if taken else [0, lines // 2]
    for page in (0, 1):
        record = {"context": page, "group": 3 + page, "group_tokens": group_tokens, "page_mode": page}
        rows.append({"i_context": {"valid": 1, "record": record}, "contexts_log2": 1})
        if taken:
            rows[-1]["i_base"] = {"valid": 1, "context": page, "line": bases[page]}
    places = [(rng.randrange(2), rng.randrange(3), rng.choice([rng.randrange(1 << 13), 8191])) for _ in range(60)]
    ended = {"i_base": {"valid": 0}} if taken else {}
    rows += [{"i_context": {"valid": 0}, **ended, "context": c, "head": h, "row": r} for c, h, r in places]
    unit = EntryAddress(2, lines, taken=taken)
    seen = clocked(unit, rows + [{}] * unit.LATENCY, ["line", "lane", "size_log2"])[2 + unit.LATENCY :]
    for (context, head, row), (line, lane, size_log2) in zip(places, seen, strict=True):
        entry = row * 4 // group_tokens if context else row * 4
        assert line == (bases[context] + entry // 4 * (3 + context) + head) % lines
        assert lane == entry % 4 or not context
        assert size_log2 == ((group_tokens - 1).bit_length() if context else 0)
