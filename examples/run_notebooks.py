"""Runs the notebooks of the examples and stores what they show: ``python run_notebooks.py`` (needs nbclient and ipykernel).

Times and versions of the run are left out, so that a file changes only where an output does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main(names: Sequence[str]) -> None:
    import nbformat
    from nbclient import NotebookClient

    for path in map(Path, names) if names else sorted(FOLDER.glob("*/*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        metadata = notebook.metadata.copy()
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": path.parent}}).execute()
        notebook.metadata = metadata
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        nbformat.write(notebook, path)
        print(f"{path}: its outputs are stored")


if __name__ == "__main__":
    main(sys.argv[1:])
