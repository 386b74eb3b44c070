"""A kernel's interface: build configurations, commands, and the expand kernel's arguments."""
