"""Proofs and mutation vectors of each unit, in the folders of the gateware: `units/weights/pack.py` is about its Pack.

A module has PROOF (or PROOFS, by variant), TARGET, or both; a unit too long for one file is a folder of `proof.py` and
`vectors.py`. `catalogue` finds them by name: `weights.pack`, `stream.queue.block`.
"""
