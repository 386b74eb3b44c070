"""Which unit lies on which tier: shares of a policy rounded to whole layers, and to layers of batches."""

from collections.abc import Sequence

from nearflash.planning.policy import Shares

__all__ = ["place_units"]


def place_units(shares: Shares, sizes: Sequence[int], tiers: Sequence[str] = ("gpu", "host", "disk")) -> list[str]:
    """The tier of each unit, of `sizes` bytes: those of a tier lie between the others as evenly as may be.

    Loads of one tier then have the others' computing to hide behind. Shares of tiers that are not named count for none.
    """
    wanted = {tier: getattr(shares, tier) for tier in tiers if getattr(shares, tier) > 0}
    total = sum(wanted.values())
    if not total:
        return [tiers[0]] * len(sizes)
    given, seen, chosen = dict.fromkeys(wanted, 0.0), 0.0, []
    for size in sizes:
        seen += max(size, 1)
        tier = max(wanted, key=lambda tier: wanted[tier] / total * seen - given[tier])
        given[tier] += max(size, 1)
        chosen.append(tier)
    return chosen
