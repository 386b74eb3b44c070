"""A transfer that takes longer than its deadline has failed; the engine never waits for it."""

import pytest

from nearflash.abi.errors import CommandError, StateError
from nearflash.serving.jobs import TransferJobs
from nearflash.storage.blocks.transfer import BlockTransfer


def refuse():
    raise StateError("too many bytes are in flight")


def test_a_job_that_never_ends_is_stopped_at_its_deadline():
    jobs, stuck = TransferJobs[int](0.02), BlockTransfer(2)
    jobs.begin(1, 2, lambda: stuck)
    assert list(jobs.take_finished()) == []
    jobs.drain()
    (job, transfer), *others = jobs.take_finished()
    assert (job, transfer.result(), others, jobs.expired) == (1, [False, False], [], 1)


def test_a_job_that_the_store_refuses_has_failed():
    jobs = TransferJobs[str](5.0)
    jobs.begin("a", 3, refuse)
    assert [(job, transfer.result()) for job, transfer in jobs.take_finished()] == [("a", [False] * 3)]


def test_a_deadline_of_nothing_is_refused():
    with pytest.raises(CommandError, match="deadline_s must be above 0, not 0"):
        TransferJobs[int](0)


def test_a_caller_that_waits_does_so_until_the_deadline():
    jobs, stuck = TransferJobs[int](0.02), BlockTransfer(2)
    stuck.settle(1, True)
    assert jobs.run(2, lambda: stuck) == [False, True] and jobs.run(1, refuse) == [False]
    assert (jobs.expired, len(jobs)) == (1, 0)
