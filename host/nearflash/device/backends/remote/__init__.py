"""A device of another machine, over ssh: this machine's scripts drive the kernel of a board on the network."""
