"""Backend `host`: the kernels' commands on the host's cores, for machines without a board."""
