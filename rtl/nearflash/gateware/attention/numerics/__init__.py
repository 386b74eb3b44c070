"""Datapaths of the attend kernel's numbers: free-running, of fixed LATENCY, one result a cycle (see README.md)."""
