import dataclasses
import random

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.gateware.attend.router import RequestRouter
from nearflash.sim.harness import run_streams
from nearflash.sim.stalls import STALLS

CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], channels=3)


@pytest.mark.parametrize("stalls", STALLS)
def test_requests_reach_their_destination_in_order(stalls):
    rng = random.Random(3)
    walkers = [
        [
            {"channel": rng.randrange(3), "request": {"context": w, "index": k, "memory": rng.random() < 0.3}}
            for k in range(30)
        ]
        for w in range(2)
    ]

    def at(destination):
        return [
            [r for r in walker if (3 if r["request"]["memory"] else r["channel"]) == destination] for walker in walkers
        ]

    expected = {f"o__{n}": [[r["request"] for r in part] for part in at(n)] for n in range(3)}
    expected["o_memory"] = at(3)
    got = run_streams(
        RequestRouter(CONFIG),
        {f"i__{w}": walker for w, walker in enumerate(walkers)},
        {name: sum(map(len, parts)) for name, parts in expected.items()},
        stalls=stalls,
    )
    for name, parts in expected.items():
        requests = [item.request if name == "o_memory" else item for item in got[name]]
        split = [[got[name][k] for k, r in enumerate(requests) if r.context == walker] for walker in range(2)]
        assert split == parts


def test_a_channel_without_room_holds_only_requests_for_it():
    full = [{"channel": 0, "request": {"context": 0}}] * (RequestRouter.PLACES + 5)
    others = [{"channel": 1, "request": {"context": 1, "index": k}} for k in range(20)]
    got = run_streams(RequestRouter(CONFIG), {"i__0": full, "i__1": others}, {"o__1": len(others)})
    assert [request.index for request in got["o__1"]] == list(range(20))
