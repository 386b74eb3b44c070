"""What this machine does in a second: measured, and kept in a file."""
