"""Timing and accuracy, as rows of figures."""
