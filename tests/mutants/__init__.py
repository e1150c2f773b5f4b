"""Plant faults in copies of the project, one at a time, and report which of them the tests notice.

    make mutants                             all of promises.toml
    make mutants PROMISES='*loss scale*'     some of them, where the promise or the place matches
    make mutants TABLE=cuda                  the faults of the CUDA kernels, on the host

Each fault of ``promises.toml`` breaks one promise, and names the tests that notice. `fault.py` finds the place in the
syntax tree, so that a change of layout leaves the row valid. A row whose place is gone is *stale*: mend it, or delete it.

A fault that no test notices *survives*: a test is missing, or the fault changes nothing that a user can see. A fault that
survives or is stale fails the run.
"""
