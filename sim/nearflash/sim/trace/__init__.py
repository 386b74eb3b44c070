"""Activity of a simulated kernel over time: recorded cycle by cycle, as trace events, as a picture, as waves."""
