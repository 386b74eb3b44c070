"""Stream components on Amaranth's own simulator."""
