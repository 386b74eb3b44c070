#!/usr/bin/env bash
# Debian packages that the Python packages do not bring: installs them when root, else says which.
set -euo pipefail
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
command -v perl >/dev/null || missing+=(perl)
command -v ccache >/dev/null || missing+=(ccache)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq "${missing[@]}" >/dev/null
else
    echo "nearflash needs these packages: ${missing[*]} (sudo apt-get install ${missing[*]})" >&2
    [ "${missing[*]}" = ccache ] || exit 1
fi
