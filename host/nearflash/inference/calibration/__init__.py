"""A model's needs in attention, measured on texts: policies, and the choice among them."""
