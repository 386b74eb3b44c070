"""The same drive event by event: which page leaves which register when. For short runs, and to check the closed form.

Requests of a channel are served by whichever of its LUNs is ready first. A LUN senses a page in each of its planes at
once (multi-plane), moves them one by one over the link, and senses again when the last has left.
"""

import heapq
from collections import deque

from nearflash.explore.ssd import Ssd

__all__ = ["program_events_s", "read_events_s"]


def read_events_s(drive: Ssd, pages: int) -> float:
    """Seconds of reading pages spread evenly over channels and LUNs, all requested at time 0."""
    return max((_read_channel(drive, each) for each in _striped(pages, drive.channels_count)), default=0.0)


def program_events_s(drive: Ssd, pages: int) -> float:
    """Seconds of programming pages spread evenly over channels and LUNs; each LUN programs its planes at once."""
    return max((_program_channel(drive, each) for each in _striped(pages, drive.channels_count)), default=0.0)


def _serve(queues: dict[int, deque[float]], read_s: float) -> float:
    """One channel: whichever LUN has sensed first takes the link."""
    ready = [(read_s, lun) for lun in queues]
    heapq.heapify(ready)
    link = 0.0
    while ready:
        sensed, lun = heapq.heappop(ready)
        link = max(link, sensed) + queues[lun].popleft()
        if queues[lun]:
            heapq.heappush(ready, (link + read_s, lun))
    return link


def _striped(pages: int, ways: int) -> list[int]:
    return [pages // ways + (way < pages % ways) for way in range(ways)]


def _read_channel(drive: Ssd, pages: int) -> float:
    luns = {
        lun: deque(batch * drive.transfer_s for batch in _batches(mine, drive.planes_count))
        for lun, mine in enumerate(_striped(pages, drive.luns_count))
        if mine
    }
    return _serve(luns, drive.read_us * 1e-6)


def _program_channel(drive: Ssd, pages: int) -> float:
    queues = [deque(_batches(mine, drive.planes_count)) for mine in _striped(pages, drive.luns_count)]
    free = [(0.0, lun) for lun, queue in enumerate(queues) if queue]
    heapq.heapify(free)
    link = done = 0.0
    while free:
        idle, lun = heapq.heappop(free)
        link = max(link, idle) + queues[lun].popleft() * drive.transfer_s
        done = max(done, link + drive.program_us * 1e-6)
        if queues[lun]:
            heapq.heappush(free, (link + drive.program_us * 1e-6, lun))
    return done


def _batches(pages: int, planes: int) -> list[int]:
    return [planes] * (pages // planes) + ([pages % planes] if pages % planes else [])
