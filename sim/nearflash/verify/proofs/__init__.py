"""Formal proof: the harness of a component, properties of streams and buses, and the runner (SymbiYosys)."""
