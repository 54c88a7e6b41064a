"""Draws synthetic-32h.csv: instances that are preempted in bursts and come back one after another.

Every two hours on average a burst takes a share of those alive (5 to 25%); an instance that is missing comes
back after 20 minutes on average; and each is preempted alone every 24 hours on average.
"""

from __future__ import annotations

import random

HOURS, TARGET, SEED = 32, 48, 32


def main() -> None:
    rng = random.Random(SEED)
    now, alive = 0.0, TARGET
    print(f"0,{alive}")
    while True:
        rates = (1 / 7200, (TARGET - alive) / 1200, alive / 86400)
        now += rng.expovariate(sum(rates))
        if now >= 3600 * HOURS:
            return
        what = rng.choices(("burst", "back", "alone"), rates)[0]
        if what == "burst":
            alive -= int(alive * rng.uniform(0.05, 0.25))
        else:
            alive += 1 if what == "back" else -1
        print(f"{now:.0f},{alive}")


if __name__ == "__main__":
    main()
