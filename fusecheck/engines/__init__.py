"""What each engine's loader accepts."""
