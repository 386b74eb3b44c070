"""Device backends: one folder or file for each name before the colon of a device's name."""
