"""Fuses the split projections of a Hugging Face checkpoint offline, and proves that nothing changed."""

__version__ = "0.1.0"
