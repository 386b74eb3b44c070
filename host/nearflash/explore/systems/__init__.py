"""One file a system: a function of model, workload and hardware that gives an Outcome."""
