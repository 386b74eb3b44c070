"""Crash-safe optimizer state: files, slots, superblocks, snapshots, import and export."""
