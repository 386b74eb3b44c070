"""Stream elements: buffers, queues, forks, joins, gearboxes and credits over `amaranth.lib.stream`."""
