"""What people see of a run: event journal, screen, report, plot, logs."""
