import pytest

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from nearflash.abi.errors import PlanError
from nearflash.planning.picture import save_picture, tier_bytes
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine
from nearflash.planning.search import plan_for
from nearflash.planning.shapes import from_config
from nearflash.planning.terms import Workload


@pytest.fixture
def plan():
    config = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000,
              "intermediate_size": 2048, "rms_norm_eps": 1e-5}  # fmt: skip
    policy = OffloadPolicy(2, 2, Shares(0.5, 0.25, 0.25), Shares(host=1), Shares(gpu=1))
    return plan_for(from_config(config), load_machine("gpu24"), Workload(64, 8), policy)


def test_the_parts_of_a_tier_sum_to_its_peak(plan):
    for tier, kinds in tier_bytes(plan).items():
        assert sum(kinds.values()) == pytest.approx(plan.peaks[tier].decode_bytes)
        assert min(kinds.values()) >= 0
    assert tier_bytes(plan)["host"]["cache"] > 0 == tier_bytes(plan)["gpu"]["cache"]


def test_a_picture_is_a_png_or_an_error(plan, tmp_path):
    save_picture(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(PlanError, match="must be writable for the picture"):
        save_picture(plan, tmp_path / "none" / "plan.png")
