"""Programs to begin with: `python -m nearflash.training.examples.plain`, and so on."""
