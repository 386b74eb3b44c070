"""Pages and flash: where pages of page_tags lie, are checked, and are erased by blocks."""
