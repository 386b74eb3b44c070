"""Keys, values and their index in the drive's memory: placement, contents, bytes read."""
