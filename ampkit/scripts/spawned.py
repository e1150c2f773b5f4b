"""What a process spawned by a script under ``python -m ampkit run`` imports as its main module: the script, once more.

Running it as a module (``python -m ampkit.scripts.spawned``, as launchers do that start the main module again by its name) runs
the script.
"""

import sys

from ampkit.scripts import running

if __name__ == "__main__":
    import json
    import os

    running.execute_as_main(running.Run(**json.loads(os.environ[running.VARIABLE])), sys.argv[1:])
else:
    running.resume_in_child(globals())
