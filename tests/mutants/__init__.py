"""Plant faults in copies of the project, one at a time, and report which of them the tests notice.

    make mutants                             about 20 minutes on two cores
    make mutants MINUTES=60 SEED=3           a longer sample, and another one
    make mutants PROMISES='*loss scale*'     only named faults, where the promise or the place matches

Named faults stand in ``promises.toml``: each breaks one promise, and names the tests that notice. `fault.py` finds the place in the
syntax tree, so that a change of layout leaves the row valid. A row whose place is gone is *stale*: mend it, or delete it.

Sampled faults are drawn at random from all that `operators.py` can plant in the functions of ampkit/: a comparison turned round, a
condition negated, a statement dropped, two arguments swapped, a constant changed, a value not returned. `reach.py` first has every
test file run once, and records which test reaches which function. A sampled fault is tried on the tests that reach its function.

A fault that no test notices *survives*: a test is missing, or the fault changes nothing that a user can see. A named fault that
survives or is stale fails the run, as do more than 10% of the sample.
"""
