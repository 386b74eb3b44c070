"""Questions asked of the system models: design-space exploration, sweeps, checks against published figures."""
