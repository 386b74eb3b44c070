import pytest

from nearflash.abi.errors import CommandError
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.shapes import ModelShape
from nearflash.planning.stages import group_sizes, place_on_stage, split_layers, stage_shapes


def test_layers_are_divided_evenly():
    assert split_layers(8, 3) == [0, 2, 5, 8]
    with pytest.raises(CommandError, match="ranks must be between 1 and 2, one for each layer, not 3"):
        split_layers(2, 3)


def test_groups_are_no_more_than_batches():
    assert group_sizes(5, 2) == [3, 2] and group_sizes(1, 4) == [1]


def test_stages_have_all_layers_once_and_the_outside_each(opt):
    shape = opt(5, 64, 4)
    stages = stage_shapes(shape, 2)
    assert sum((stage.layers for stage in stages), ()) == shape.layers
    assert {stage.outside for stage in stages} == {shape.outside}
    assert [stage.head for stage in stages] == [0, shape.head]
    assert [stage.state_waits for stage in stages] == [3, 3] and shape.state_waits == 5


def test_a_stage_of_one_rank_is_the_model(opt):
    shape = opt(3, 64, 4)
    (stage,) = stage_shapes(shape, 1)
    assert {name: getattr(stage, name) for name in ModelShape.__dataclass_fields__} == {
        name: getattr(shape, name) for name in ModelShape.__dataclass_fields__
    }


def test_shares_are_rounded_to_a_ranks_own_layers(opt):
    shape = opt(4, 64, 4)
    policy = OffloadPolicy(1, 3, Shares(gpu=0.5, disk=0.5), Shares(gpu=0.5, host=0.5), Shares(host=1))
    first, last = (place_on_stage(shape, policy, stage) for stage in stage_shapes(shape, 2))
    assert first.weights == last.weights == Shares(gpu=0.5, disk=0.5)
    assert first.cache == last.cache == Shares(gpu=0.5, host=0.5) and first.activations == Shares(host=1)
