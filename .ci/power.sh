#!/usr/bin/env bash
# QEMU, a kernel and tools of file systems for tests/power: installs them when root, else says which are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
kernel=build/power/kernel
declare -A packages=([qemu-system-x86_64]=qemu-system-x86 [debugfs]=e2fsprogs [mkfs.xfs]=xfsprogs [busybox]=busybox-static)
missing=()
for program in "${!packages[@]}"; do
    command -v "$program" >/dev/null || missing+=("${packages[$program]}")
done
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "tests/power needs Debian's apt-get and dpkg-deb" >&2; exit 1; }
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "tests/power needs these packages: ${missing[*]} (sudo apt-get install ${missing[*]})" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
[ -e "$kernel/.stamp" ] && exit 0
# The kernel is unpacked here, not installed: no boot loader is touched.
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)
[ -n "$package" ] || { echo "no package of Debian's cloud kernel is known: apt-get update" >&2; exit 1; }
rm -rf "$kernel" && mkdir -p "$kernel"
(cd "$kernel" && apt-get download -qq "$package")
dpkg-deb -x "$kernel/$package"_*.deb "$kernel"
rm "$kernel/$package"_*.deb
touch "$kernel/.stamp"
