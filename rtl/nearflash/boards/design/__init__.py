"""Parts of every board's design: a kernel, modules converted once, the git revision."""
