"""Inject faults into training runs for as long as you like, and report which of ampkit's promises did not hold.

    make soak                            every group of faults, 10 minutes
    make soak MINUTES=60 SEED=3          longer, and other cases
    make soak ONLY=death                 one group, or one promise by its name

A promise (`promise.py`) is a sentence, the way it is attacked, and a function that makes one attempt. The groups are modules of
them: `nonfinite`, `interrupts`, `death`, `processes`, `threads`, `lifetimes`, `hostile`. `runs.py` has the training runs
that they attack: drawn at random, and compared with an undisturbed run bit for bit, or with plain torch in float32.

The driver (`__main__.py`) gives every promise its share of the time. Each attempt is a process of its own, forked from one that has
loaded torch, with a limit on its time: a crash and a hang are violations like any other. A case is drawn from (seed, promise,
number), so the command that is printed beside a violation repeats it; where signals and kills come is left to the clock.
docs/make_reliability.py makes docs/reliability.md of what the driver writes.
"""

import os

# Attempts are forks, side by side, of a process that must not have threads: said before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
