"""Boards without a board: what vendors' runtimes show a driver, over the Verilated kernel."""
