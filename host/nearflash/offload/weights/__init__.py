"""A layer's weights on their tiers: a model without memory, the layout of a buffer, reads ahead, codes of 4 bits."""
