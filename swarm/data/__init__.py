"""What is read and trained on."""
