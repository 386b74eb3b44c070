"""Device `nvme`: a drive with the command sets Computational Programs and Subsystem Local Memory."""
