"""The demo: fine-tunes a small model through the simulated updater and checks every word of the result."""
