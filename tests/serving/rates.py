"""GB/s of our block store and of vLLM's own tier of files, in turns on one disk, beside the disk's own.

python rates.py FOLDER [--sizes BYTES ...] [--repeats N] [--turn-bytes N]: a row of JSON for each size. vLLM's
tier is asked as its manager asks it: a job of 32 MiB is one task of its pool of 16 threads a direction, by its compiled
loops where they are there. It flushes nothing, so what it has stored is not durable when it says so; ours is.
"""

import argparse
import functools
import json
import shutil
import tempfile
from pathlib import Path

from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block, probe_o_direct
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from nearflash.bench.storage.blocks import MEMORY_BYTES, make_noise, measure_rates
from nearflash.storage.io.bandwidth import Probe

BATCH_BYTES = 32 << 20
THREADS = 16


class Files:
    """vLLM's tier of files: blocks of one turn, in memory that is as large as ours."""

    def __init__(self, folder, memory, size):
        self._folder, self._size, self._direct = folder, size, probe_o_direct(str(folder.parent))
        self._memory, self._rows = memoryview(memory), len(memory) // size
        self._pool = DualQueueThreadPool(THREADS, THREADS)

    def store(self, keys):
        self._move(self._pool.enqueue_store, batch_store_block, keys)

    def load(self, keys):
        self._move(self._pool.enqueue_load, batch_load_block, keys)

    def remove(self, _):
        shutil.rmtree(self._folder)

    def _move(self, enqueue, move, keys):
        batch = max(BATCH_BYTES // self._size, 1)
        for start in range(0, len(keys), batch):
            part = range(start, min(start + batch, len(keys)))
            paths = [str(self._folder / keys[at].decode()[-3:] / f"{keys[at].decode()}.bin") for at in part]
            offsets = [at % self._rows * self._size for at in part]
            enqueue(start, 1, [functools.partial(move, paths, self._memory, offsets, self._size, self._direct)])
        self._pool.wait_idle()
        if not all(success for _, success, _ in self._pool.get_finished()):
            raise AssertionError("vLLM's tier must have moved every block")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256 << 10, 1 << 20, 4 << 20])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--turn-bytes", type=int, default=1 << 30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".nearflash-rates-", dir=given.folder) as inside:
        folder, memory = Path(inside), make_noise(max(MEMORY_BYTES, *given.sizes))
        with Probe(folder, given.turn_bytes) as probe:
            for size in given.sizes:
                files = Files(folder / "files", memory, size)
                peers = {"vllm_files_put": files.store, "vllm_files_get": files.load, "removal": files.remove}
                row = measure_rates(folder / "blocks", probe, memory, size, given.turn_bytes, given.repeats, peers)
                del row["removal_gb_per_second"]
                print(json.dumps({"bench": "serving_rates", **row}), flush=True)


if __name__ == "__main__":
    main()
