import pytest

from nearflash.inference.engines.base import EngineCounters


def counted(heads, kinds, phases):
    return EngineCounters(heads, dict(kinds), dict(phases))


def test_counters_add_and_subtract_by_name():
    one = counted(2, {"token": 10}, {"attend": 1.0})
    two = counted(3, {"token": 5, "index": 7}, {"scan": 0.5})
    both = one + two
    assert both == counted(5, {"token": 15, "index": 7}, {"attend": 1.0, "scan": 0.5})
    assert both - one == counted(3, {"token": 5, "index": 7}, {"attend": 0.0, "scan": 0.5})
    assert one == counted(2, {"token": 10}, {"attend": 1.0})


def test_counters_count_and_start_at_zero_again():
    counters = EngineCounters()
    for size in (3, 4):
        counters.count("token", size)
    with pytest.raises(OSError), counters.time_phase("attend"):
        raise OSError
    taken = counters.take()
    assert taken.flash_bytes == {"token": 7} and taken.seconds["attend"] >= 0 and counters == EngineCounters()


def test_an_engine_closes_behind_its_block(make_engine):
    with make_engine(2) as engine:
        pass
    assert engine.closed == 1
