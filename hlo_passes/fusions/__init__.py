"""What fusions save of a program's traffic, and why others are not made."""
