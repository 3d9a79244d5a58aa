"""What is found wrong with a kernel, and how it is told."""
