"""What a trainer keeps on its own disk."""
