"""Mutation: do the vectors of a unit notice when its gateware is changed? See README.md."""
