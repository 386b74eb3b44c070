"""Programs to begin with: `python -m nearflash.inference.examples.summarise`, `… .chat`."""
