"""What scripts/engine-check is made of: checkpoints, ways to quantise and to break them, and a program for each engine."""
