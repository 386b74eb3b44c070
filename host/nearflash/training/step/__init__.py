"""One optimizer step: plan, schedule, transfers, update, publication of the parameters."""
