"""The command generate, by plan or by options, and pictures of a plan."""
