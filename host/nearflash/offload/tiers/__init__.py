"""Memory and disk that hold a generation: links to what computes, budgets, hidden states."""
