"""This machine: its rates as measured, the file that keeps them, and the plan for a model on it."""
