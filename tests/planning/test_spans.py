"""What a plan predicts, as spans."""

import pytest

from nearflash.planning.plan_file import PlanFile
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.spans import predict_spans
from nearflash.planning.terms import Workload
from nearflash.support.timeline import Predicted

PREDICTION = {
    "prefill_seconds": 5.0, "decode_seconds": 4.0, "prefill_parts_seconds": {"gpu": 3.0, "weights from disk": 5.0},
    "decode_parts_seconds": {"gpu": 2.0, "cache from disk": 4.0, "host": 0.0},
}  # fmt: skip


def spans(sequences, overlap):
    disk = Shares(disk=1.0)
    policy = OffloadPolicy(2, 2, weights=disk, cache=disk, activations=disk, overlap=overlap)
    return list(predict_spans(PlanFile(policy, Workload(8, 3), "", "here", PREDICTION), sequences))


def test_parts_that_overlap_begin_together():
    assert spans(4, True) == [
        Predicted("phases", "prefill", 0, 5), Predicted("gpu", "prefill", 0, 3),
        Predicted("weights from disk", "prefill", 0, 5), Predicted("phases", "step 1", 5, 2),
        Predicted("gpu", "step 1", 5, 1), Predicted("cache from disk", "step 1", 5, 2),
        Predicted("phases", "step 2", 7, 2), Predicted("gpu", "step 2", 7, 1),
        Predicted("cache from disk", "step 2", 7, 2),
    ]  # fmt: skip


def test_parts_that_do_not_overlap_follow_one_another():
    assert [each.start_s for each in spans(1, False) if each.name == "step 1"] == [5, 5, 6]


@pytest.mark.parametrize(("sequences", "blocks"), [(1, 1), (4, 1), (5, 2), (9, 3)])
def test_blocks_follow_one_another(sequences, blocks):
    found = [each.start_s for each in spans(sequences, True) if (each.row, each.name) == ("phases", "prefill")]
    assert found == [9.0 * block for block in range(blocks)]
