"""Reference of the updater: the Adam lane."""
