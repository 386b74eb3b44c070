"""nextpnr's chip database: read, and patched for placement and timing."""
