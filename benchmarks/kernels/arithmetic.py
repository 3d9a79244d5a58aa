"""Kernels whose time goes into arithmetic."""
