"""Benches: what each measures comes from its own package; the runner adds where and with what it was measured."""
