"""Mutation: do the vectors of a unit detect that its gateware was changed?"""
