"""What every board's design is made of: a kernel, modules converted once, the git revision."""
