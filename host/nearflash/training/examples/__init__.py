"""Programs to begin with: `python -m nearflash.training.examples.plain`, `… .trainer`, `… .deepspeed`."""
