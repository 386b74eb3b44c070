"""Pages and flash: where pages of owners lie, are checked, and are erased by blocks."""
