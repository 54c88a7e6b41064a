"""Random schedules of faults against the real roles: what happens, when, and whether the guarantees held."""
