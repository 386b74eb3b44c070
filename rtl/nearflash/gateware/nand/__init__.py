"""One NAND channel: link, controller, and the check of what comes from it."""
