import pytest

pytest.importorskip("scipy")

from nearflash.abi.errors import CommandError, PlanError
from nearflash.planning.memory import peaks
from nearflash.planning.pipeline import plan_pipeline, search_pipeline
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.search import Space, plan_for, search
from nearflash.planning.stages import STATES_SENT, TOKENS_SENT, StageShape
from nearflash.planning.terms import Workload

WORK = Workload(512, 32)
MANY = Space(max_sequences=64)
DISK, HOST, GPU = Shares(disk=1), Shares(host=1), Shares(gpu=1)


def moved(plan, link):
    return plan.prediction.bytes_per_token.get(link, 0.0) * plan.prediction.generated_tokens


def test_one_rank_is_planned_as_ever(opt_6_7b, t4):
    assert search_pipeline(opt_6_7b, t4, WORK, MANY, 1) == search(opt_6_7b, t4, WORK, MANY)
    policy = OffloadPolicy(4, 2, DISK, HOST, GPU)
    one, plain = (plan(opt_6_7b, t4, WORK, policy, *ranks) for plan, ranks in ((plan_pipeline, (1,)), (plan_for, ())))
    assert one.peaks == plain.peaks and one.prediction.bytes_per_token == pytest.approx(
        plain.prediction.bytes_per_token
    )
    assert one.prediction.seconds == pytest.approx(plain.prediction.seconds)


def test_decode_scales_more_than_ranks_where_memory_was_short(opt, t4):
    """FlexGen, section 6.3: super-linear scaling, as each GPU has less to hold."""
    one, four = (search_pipeline(opt(48, 7168, 56), t4, WORK, MANY, ranks) for ranks in (1, 4))
    assert four.prediction.decode_tokens_per_second > 4 * one.prediction.decode_tokens_per_second
    assert four.prediction.tokens_per_second > one.prediction.tokens_per_second


def test_every_rank_of_a_plan_fits(opt_175b, t4):
    plan = search_pipeline(opt_175b, t4.with_memory(host_bytes=60e9), WORK, MANY, 4)
    assert plan.ranks == 4 and all(peak.fits for stage in plan.stages for peak in stage.peaks.values())
    for stage in plan.stages:
        assert isinstance(stage.shape, StageShape)
        assert stage.peaks == peaks(stage.shape, stage.machine, stage.workload, stage.policy)
    assert plan.prediction.seconds >= max(stage.prediction.seconds for stage in plan.stages)


def test_layers_are_loaded_once_a_group(opt_6_7b, t4):
    one, two = (plan_pipeline(opt_6_7b, t4, WORK, OffloadPolicy(4, count, DISK, HOST, GPU), 2) for count in (1, 2))
    alone = plan_for(opt_6_7b, t4, WORK, OffloadPolicy(4, 2, DISK, HOST, GPU))
    link = "weights disk to host"
    assert moved(two, link) == pytest.approx(2 * moved(one, link)) == pytest.approx(2 * moved(alone, link), rel=0.1)


def test_bytes_between_ranks_are_states_and_tokens(opt_6_7b, t4):
    plan = plan_pipeline(opt_6_7b, t4, WORK, OffloadPolicy(4, 2, DISK, HOST, GPU), 4)
    passed = 2 * 4096 * 8 * (512 + 31)
    assert [moved(stage, STATES_SENT) for stage in plan.stages] == pytest.approx([passed] * 3 + [0])
    assert [moved(stage, TOKENS_SENT) for stage in plan.stages] == pytest.approx([0] * 3 + [8 * 8 * 32 * 3])


def test_what_does_not_fit_is_rejected_with_its_rank(opt_175b, opt_6_7b, t4):
    with pytest.raises(PlanError, match=r"rank 3 of 4, layers 72 to 95: a model must fit t4: .* GB on gpu"):
        search_pipeline(opt_175b, t4.with_memory(gpu_bytes=1e9), WORK, MANY, 4)
    with pytest.raises(PlanError, match="rank 0 of 2, layers 0 to 15: a plan must fit gpu memory"):
        plan_pipeline(opt_6_7b, t4.with_memory(gpu_bytes=1e9), WORK, OffloadPolicy(4, 2, DISK, HOST, GPU), 2)
    with pytest.raises(CommandError, match="ranks must be between 1 and 32"):
        search_pipeline(opt_6_7b, t4, WORK, MANY, 33)


def test_a_bound_on_the_time_is_kept(opt_175b, t4):
    free = search_pipeline(opt_175b, t4, WORK, MANY, 4)
    bound = free.prediction.seconds * 0.9
    assert (
        search_pipeline(opt_175b, t4, WORK, Space(max_sequences=64, max_seconds=bound), 4).prediction.seconds <= bound
    )
    with pytest.raises(PlanError, match=r"max_seconds must be \d+ or more for one sequence on 4 ranks of t4, not 6"):
        search_pipeline(opt_175b, t4, WORK, Space(max_sequences=64, max_seconds=6), 4)
