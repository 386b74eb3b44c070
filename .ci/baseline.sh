#!/usr/bin/env bash
# DeepSpeed for `nearflash bench train`, in a virtual environment of its own that sees the packages of .venv behind its
# own: one torch for both. Its C++ operators are compiled here (some 4 minutes on two cores), not at the first step.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-deepspeed
if ! [ -e /usr/include/libaio.h ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq libaio-dev >/dev/null
    else
        echo "DeepSpeed needs this package: sudo apt-get install libaio-dev" >&2
        exit 1
    fi
fi
test -x $venv/bin/python || .venv/bin/python -m venv $venv
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" >"$own/project.pth"
pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" setuptools wheel
# --no-deps: the rest of what it needs is there, and torch must not be replaced by a CUDA build.
"${pip[@]}" --no-deps hjson einops msgpack ninja py-cpuinfo
"${pip[@]}" --no-deps --no-build-isolation deepspeed==0.19.8
rm -f $venv/ops/*/lock # left by a build that was killed: the next one would wait for it for ever
$venv/bin/python -m nearflash.bench.training.deepspeed_case --build
touch $venv/.stamp
