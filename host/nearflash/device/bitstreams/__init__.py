"""Boards and their bitstreams: what a board is, what was built for it, and whether the files still are that."""

from nearflash.device.bitstreams.board import Board, bitstreams_root, boards, load_board
from nearflash.device.bitstreams.manifest import BuildManifest, load_manifest

__all__ = ["Board", "BuildManifest", "bitstreams_root", "boards", "load_board", "load_manifest"]
