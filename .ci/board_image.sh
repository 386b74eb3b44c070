#!/usr/bin/env bash
# The board's wheel where a board would have it, from an empty image: Debian's armhf Python and NumPy under qemu's user-mode
# emulation (32 bits, armv7l), in a root of their own in build/board; then Python 3.10 with NumPy 1.21, as PYNQ 3.0's image
# has them, where NEARFLASH_PYTHON310 names one. Needs root (chroot), mmdebstrap and qemu-user-static.
set -euo pipefail
cd "$(dirname "$0")/.."
for program in mmdebstrap qemu-arm-static chroot; do
  command -v $program >/dev/null || { echo "$program must be there (apt install mmdebstrap qemu-user-static)" >&2; exit 2; }
done
test "$(id -u)" = 0 || { echo "root must run this: it changes the root folder" >&2; exit 2; }
folder=build/board
root=$folder/root
wheel=$(.venv/bin/python .ci/board_wheel.py $folder | cut -d: -f1)
transcript=$folder/update.jsonl
.venv/bin/nearflash selftest --device verilator:update-pynq-z2 --params 200 --record $transcript | tail -n 1

if ! test -e $root/usr/bin/qemu-arm-static; then
  rm -rf $root
  mirror=$(.venv/bin/python -c 'from nearflash.boards.open.packages import mirror; print(mirror())')
  mmdebstrap --quiet --variant=extract --architectures=armhf --include=python3,python3-numpy,python3-pip bookworm $root "$mirror"
  mkdir -p $root/root $root/tmp
  cp "$(command -v qemu-arm-static)" $root/usr/bin
fi
cp "$wheel" $transcript $root/root/
board() { # A program of the image's Python; NumPy's BLAS lies where Debian's alternatives, not set up here, find it.
  chroot $root /usr/bin/qemu-arm-static -E LD_LIBRARY_PATH=/usr/lib/arm-linux-gnueabihf/blas:/usr/lib/arm-linux-gnueabihf/lapack \
    -E NEARFLASH_REPLAY=/root/update.jsonl -E HOME=/root /usr/bin/python3 "$@"
}
try() { # The commands of the guide that need no board.
  "$@" bitstream verify pynq-z2
  for kernel in update expand attend; do
    "$@" selftest --device model:$kernel-tiny | tail -n 1
  done
  "$@" selftest --device replay:update-pynq-z2 --params 200 | tail -n 1
}
board -c 'import platform, numpy; print(platform.machine(), platform.python_version(), "numpy", numpy.__version__)'
board -m pip install -q --root-user-action=ignore --break-system-packages --no-index --force-reinstall --no-deps "/root/${wheel##*/}"
try board /usr/local/bin/nearflash

if test -n "${NEARFLASH_PYTHON310:-}"; then
  rm -rf $folder/venv
  "$NEARFLASH_PYTHON310" -m venv --without-pip $folder/venv
  .venv/bin/python -m pip --python $folder/venv/bin/python install -q --disable-pip-version-check 'numpy==1.21.5' "$wheel"
  $folder/venv/bin/python -c 'import platform, numpy; print(platform.python_version(), "numpy", numpy.__version__)'
  NEARFLASH_REPLAY=$transcript try $folder/venv/bin/nearflash
fi
