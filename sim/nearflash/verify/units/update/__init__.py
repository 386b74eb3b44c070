"""Units of the updater."""
