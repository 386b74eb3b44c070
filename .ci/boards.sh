#!/usr/bin/env bash
# PYNQ for the tests of its driver, in a virtual environment of its own: PYNQ 4.0.0 needs NumPy 1. It sees the packages
# of .venv behind its own.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-pynq
test -x $venv/bin/python || .venv/bin/python -m venv $venv
own=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -f "$own/project.pth" # pip would try to replace the NumPy of .venv
$venv/bin/python -m pip install -q --disable-pip-version-check pynq==4.0.0 'numpy<2'
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" >"$own/project.pth"
touch $venv/.stamp
