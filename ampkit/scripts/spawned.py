"""The main module of processes that a script under ``python -m ampkit run`` spawns: importing it executes the script again.

Running it as a module (``python -m ampkit.scripts.spawned``) runs the script. Some launchers start the main module so, by its
name.
"""

import sys

from ampkit.scripts import running

if __name__ == "__main__":
    import json
    import os

    running.execute_as_main(running.Run(**json.loads(os.environ[running.VARIABLE])), sys.argv[1:])
else:
    running.resume_in_child(globals())
