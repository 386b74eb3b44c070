"""A layer's weights on their tiers: layout in a buffer, reads ahead, experts of mixtures."""
