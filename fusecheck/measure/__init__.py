"""Measurements on one device: separate projections against fused ones, and loading either."""
