import pytest

from nearflash.verify.bench import simulation


def test_one_object_with_the_keys_that_checks_read():
    pytest.importorskip("nearflash.gateware.top.update")
    (found,) = simulation.run({"update-tiny": 512})
    assert found["config"] == "update-tiny"
    assert found["unit"] == "cycles/s"
    # Slower than Amaranth's own simulator would mean that something is built wrong.
    assert found["cycles_per_second"] > 20_000
    assert found["spread"] >= 0
