"""Pure decisions: functions of (what is known, now, seed) to (decision, reason).  No clock, no I/O, no torch."""
