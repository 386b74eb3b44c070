"""Direct I/O: aligned buffers, request queues, checksums, measured bandwidth."""
