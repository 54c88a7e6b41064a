"""One set of tests that the simulated and the real adapters of each port pass: what roles rely on."""
