"""Memory and disk that hold a generation: links to what computes, budgets, shares rounded to units, hidden states."""
