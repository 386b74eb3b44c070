"""What a step notes of its phases."""

import tracemalloc

from nearflash.training.step.report import SPANS, Report


def test_optimizer_notes_its_phases(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    assert set(optimizer.report.timeline.seconds) == {
        "step", "flash read", "norm", "gather gradients", "update", "stage", "flash write", "commit",
        "publish"}  # fmt: skip


def test_memory_of_spans_is_bounded():
    """It grew by 2 KB an extent in four steps, up to 50 MB."""
    report = Report()
    tracemalloc.start()
    try:
        for number in range(SPANS + 5000):
            with report.timeline.span("update", extent=number):
                pass
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 8e6
