"""What a model's attention needs, measured on texts: policies, and the choice among them."""
