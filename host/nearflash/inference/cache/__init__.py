"""Cache and attention function for transformers."""
