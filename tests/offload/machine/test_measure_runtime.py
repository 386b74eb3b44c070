import pytest

from nearflash.offload.machine.measure_runtime import VisitSeconds


def test_seconds_are_of_a_layer_a_pass_a_start_and_an_engines_visit():
    """Four batches of four sequences, two and ten layers; the least of the runs counts."""
    few = [(0.4, 1.0), (0.3, 0.7)]
    many = [(0.62, 9.0), (0.7, 9.0)]
    found = VisitSeconds.of(few, many, [(0.94, 9.0), (2.0, 9.0)])
    assert found.layer == pytest.approx(0.32 / 32)
    assert found.one_pass == pytest.approx(0.3 / 4 - 2 * 0.01)
    assert found.start == pytest.approx(0.4 / 4)
    assert found.engine == pytest.approx(0.32 / 160)


def test_an_engine_that_is_faster_takes_nothing_more():
    assert VisitSeconds.of([(0.3, 0.3)], [(0.5, 0.5)], [(0.4, 0.5)]).engine == 0
