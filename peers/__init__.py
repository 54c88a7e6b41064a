"""The programs that people start."""
