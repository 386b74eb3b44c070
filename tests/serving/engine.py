"""A run of vLLM in a process of its own: prompts in, tokens and the tier's counts out, as JSON.

python engine.py MODEL TIER PROMPTS: TIER is the tier's configuration as JSON ("": no offloading), PROMPTS lists of
token ids; "stop" after PROMPTS: wait to be killed after the first.
"""

import json
import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
               "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip


def offloading(tier):
    from vllm.config import KVTransferConfig

    extra = {"spec_name": "HostSpec", "spec_module_path": "host_spec", "cpu_bytes_to_use": 8 << 20,
             "secondary_tiers": [tier]}  # fmt: skip
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def main(model, tier, prompts):
    from vllm import LLM, SamplingParams

    tier, prompts = json.loads(tier or "null"), json.loads(prompts)
    options = {"kv_transfer_config": offloading(tier)} if tier else {}
    llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=512, max_num_seqs=2, block_size=32,
              num_gpu_blocks_override=80, enable_prefix_caching=True, **options)  # fmt: skip
    greedy, tokens, cached = SamplingParams(temperature=0, max_tokens=8), [], []
    for prompt in prompts:
        result = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        tokens.append(list(result.outputs[0].token_ids))
        cached.append(result.num_cached_tokens)
        print(json.dumps({"tokens": tokens[-1]}), flush=True)
    store = None
    if tier:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        manager = scheduler.connector.connector_scheduler.manager
        found = manager.secondary_tiers[0]
        end = time.monotonic() + 20
        while manager._jobs and time.monotonic() < end:
            manager._process_finished_jobs()
            time.sleep(0.01)
        store = vars(found._store.stats()) | {"expired": found._loads.expired}
    print(json.dumps({"tokens": tokens, "cached": cached, "store": store}), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
