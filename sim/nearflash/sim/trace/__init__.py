"""What a simulated kernel does over time: recorded cycle by cycle, as trace events, as a picture, as waves."""
