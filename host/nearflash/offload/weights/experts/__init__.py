"""Experts of mixtures as units of loading: those of a model, how often each was routed, their cache, the patch."""
