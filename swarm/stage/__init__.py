"""One stage in torch: its parameters, gradient, optimizer, and the thread that computes."""
