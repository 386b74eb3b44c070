"""Near-storage optimizers with torch's interface."""
