#!/usr/bin/env bash
# Debian packages that the Python packages do not bring: installs them when root, else says which.
# ccache only makes repeated builds faster, and tclsh only runs the vendors' scripts in tests: nothing stops without them,
# nor without those named as arguments.
set -euo pipefail
missing=()
for program in g++ make perl; do
    command -v "$program" >/dev/null || missing+=("$program")
done
optional=()
command -v ccache >/dev/null || optional+=(ccache)
command -v tclsh >/dev/null || optional+=(tcl)
for program in "$@"; do
    command -v "$program" >/dev/null || optional+=("$program")
done
[ ${#missing[@]} -eq 0 ] && [ ${#optional[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" "${optional[@]}" >/dev/null || failed=yes
    [ -z "${failed:-}" ] && exit 0
fi
echo "nearflash uses these packages: ${missing[*]} ${optional[*]} (sudo apt-get install ${missing[*]} ${optional[*]})" >&2
[ ${#missing[@]} -eq 0 ]
