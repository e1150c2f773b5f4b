"""Results of long runs in a file of JSON lines: a run whose result is there is not done again."""

import json
from pathlib import Path


class Results:
    """Results by key, in the file at ``path``, one line each; without a path nothing is kept."""

    def __init__(self, path):
        self.path, self.known = path and Path(path), {}
        if self.path and self.path.exists():
            lines = map(json.loads, self.path.read_text().splitlines())
            self.known = {tuple(line["run"]): line["result"] for line in lines}

    def get(self, key, run):
        """The result under ``key``, a tuple of strings and numbers; without one, that of ``run()``."""
        if key not in self.known:
            self.known[key] = run()
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps({"run": key, "result": self.known[key]}) + "\n")
        return self.known[key]
