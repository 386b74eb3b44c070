"""A run of vLLM in a process of its own: prompts in, tokens and the tier's counts out, as JSON.

python engine.py MODEL TIER STEPS: TIER is the tier's configuration as JSON ("": no offloading); each of STEPS is a
prompt (token ids), whose tokens are printed, or a name: "remove" the tier's file, "full": no write finds room any more,
"slow": each write takes a second, and prompts do not wait for the tier's
stores any more. GPU memory and the host's each hold two prompts of 400 tokens.
"""

import errno
import json
import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
               "OMP_NUM_THREADS": "1"}  # fmt: skip


def offloading(tier):
    from vllm.config import KVTransferConfig

    extra = {"spec_name": "HostSpec", "spec_module_path": "host_spec", "cpu_bytes_to_use": 10 << 20,
             "secondary_tiers": [tier]}  # fmt: skip
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def disturb(store, step):
    """Have the drive fail, or be slow, from now on."""
    (file,) = store._files
    backend, write = file._file.backend, file._file.backend.write

    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait(*arguments):
        time.sleep(1)
        return write(*arguments)

    if step == "remove":
        file.path.unlink()
    else:
        backend.write = {"full": fail, "slow": wait}[step]


def finish(manager):
    """Wait for the tier's transfers; its counts."""
    end = time.monotonic() + 20
    while manager._jobs and time.monotonic() < end:
        manager._process_finished_jobs()
        time.sleep(0.01)
    found = manager.secondary_tiers[0]
    return vars(found._store.stats()) | {"expired": found._loads.expired + found._stores.expired}


def main(model, tier, steps):
    from vllm import LLM, SamplingParams

    tier, steps = json.loads(tier or "null"), json.loads(steps)
    options = {"kv_transfer_config": offloading(tier)} if tier else {}
    llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=512, max_num_seqs=2, block_size=32,
              num_gpu_blocks_override=28, enable_prefix_caching=True, **options)  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.connector.connector_scheduler.manager if tier else None
    greedy, tokens, cached = SamplingParams(temperature=0, max_tokens=8), [], []
    for step in steps:
        if isinstance(step, str):
            disturb(manager.secondary_tiers[0]._store, step)
            continue
        result = llm.generate([{"prompt_token_ids": step}], greedy, use_tqdm=False)[0]
        tokens.append(list(result.outputs[0].token_ids))
        cached.append(result.num_cached_tokens)
        print(json.dumps({"tokens": tokens[-1]}), flush=True)
        if tier and "slow" not in steps:
            finish(manager)
    store = finish(manager) if tier else None
    print(json.dumps({"tokens": tokens, "cached": cached, "store": store}), flush=True)
    core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
