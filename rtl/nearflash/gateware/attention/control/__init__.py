"""Control half of the attend kernel: from descriptors in memory to page requests."""
