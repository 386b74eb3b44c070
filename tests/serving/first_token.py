"""Time to first token in vLLM on processors: computed, loaded from a tier's drive, and from vLLM's own tier of files.

python first_token.py MODEL FOLDER [--lengths N ...] [--repeats N] [--buffered]: rows of JSON for each tier and length.
Each prompt is stored and, when memory has forgotten it and the page cache is dropped, asked again: `cached_tokens` were
not computed then. MODEL: the folder of a Llama (prompts may be longer than it is made for); FOLDER: on the drive.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK_TOKENS = 32
TIERS = ("none", "nearflash", "fs")


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tier", choices=TIERS)
    parser.add_argument("--buffered", action="store_true", help="nearflash through the page cache, too")
    return parser.parse_args()


def block_bytes(model):
    facts = json.loads((model / "config.json").read_text())
    width = facts["num_key_value_heads"] * facts["head_dim"] * facts["num_hidden_layers"]
    return 2 * width * BLOCK_TOKENS * 4


def offloading(tier, folder, blocks, size, direct):
    from vllm.config import KVTransferConfig

    own = {"type": "NearflashTier", "module_path": "nearflash.serving.vllm", "path": str(folder), "deadline_s": 60,
           "capacity_bytes": 3 << 30, "direct": direct}  # fmt: skip
    tiers = [{"nearflash": own, "fs": {"type": "fs", "root_dir": str(folder)}}[tier]]
    extra = {"spec_name": "HostSpec", "spec_module_path": "host_spec", "cpu_bytes_to_use": blocks * size,
             "secondary_tiers": tiers}  # fmt: skip
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def drop_page_cache(folder):
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def finish(manager):
    while manager and manager._jobs:
        manager._process_finished_jobs()
        time.sleep(0.005)


def measure(arguments, folder):
    """Seconds, and tokens that were not computed, of each prompt at its first and its second time."""
    from vllm import LLM, SamplingParams

    blocks = max(arguments.lengths) // BLOCK_TOKENS * 5 // 4
    size = block_bytes(arguments.model)
    options = {} if arguments.tier == "none" else {
        "kv_transfer_config": offloading(arguments.tier, folder, blocks, size, not arguments.buffered)}  # fmt: skip
    longest = max(arguments.lengths) + BLOCK_TOKENS
    llm = LLM(str(arguments.model), enforce_eager=True, dtype="float32", max_model_len=longest, max_num_seqs=1,
              block_size=BLOCK_TOKENS, num_gpu_blocks_override=blocks, enable_prefix_caching=True,
              **options)  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.connector.connector_scheduler.manager if options else None
    one = SamplingParams(temperature=0, max_tokens=1)
    prompts = [(length, [(number * 7919 + length + 31 * at) % 8000 for at in range(length)])
               for length in arguments.lengths for number in range(arguments.repeats)]  # fmt: skip
    step = [{"prompt_token_ids": [5] * (BLOCK_TOKENS - 1)}]
    llm.generate(step, one, use_tqdm=False)
    for turn in ("first", "second"):
        for length, prompt in prompts:
            start = time.perf_counter()
            result = llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)[0]
            yield turn, length, time.perf_counter() - start, result.num_cached_tokens
            llm.generate(step, one, use_tqdm=False)  # vLLM hands blocks to its tiers in the next step
            finish(manager)
        drop_page_cache(folder)
    core.shutdown()


def report(arguments, seen):
    for length in arguments.lengths:
        for turn in ("first", "second"):
            runs = [run for run in seen if run[:2] == (turn, length)]
            times = [seconds for _, _, seconds, _ in runs]
            print(json.dumps({
                "bench": "first_token", "model": arguments.model.name, "tier": arguments.tier, "prompt_tokens": length,
                "turn": turn, "repeats": len(runs), "cached_tokens": statistics.median(run[3] for run in runs),
                "median_s": round(statistics.median(times), 4), "least_s": round(min(times), 4),
                "most_s": round(max(times), 4), "load_average": round(os.getloadavg()[0], 1),
            }), flush=True)  # fmt: skip


def main():
    arguments = read_arguments()
    if arguments.tier is None:
        for tier in TIERS:
            subprocess.run([sys.executable, *sys.argv, "--tier", tier], check=True)
        return
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                   "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                   "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix=".nearflash-first-", dir=arguments.folder) as inside:
        report(arguments, list(measure(arguments, Path(inside))))


if __name__ == "__main__":
    main()
