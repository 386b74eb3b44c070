"""Planning of offloaded generation: what a machine's tiers hold, what each step costs, which policy is best."""
