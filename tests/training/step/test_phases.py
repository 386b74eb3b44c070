"""What a step notes of its phases."""


def test_optimizer_notes_its_phases(tensors, set_gradients, open_optimizer):
    optimizer = open_optimizer(tensors)
    set_gradients(tensors, 0)
    optimizer.step()
    assert set(optimizer.report.timeline.seconds) == {
        "step", "flash read", "norm", "gather gradients", "update", "stage", "flash write", "commit",
        "publish"}  # fmt: skip
