"""Models of near-storage systems: seconds, energy, memory, traffic, cost and wear, before anyone builds them."""
