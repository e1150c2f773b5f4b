"""Writes the page of an example recording, docs/recording-example.html, and with Chromium a picture of it, docs/recording.png.

$ python docs/make_recording.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "recording-example.html", DOCS / "recording.png"
WINDOW = "1360,1480"


def main():
    command = [sys.executable, "-m", "ampkit", "record", "--html", PAGE, DOCS / "recording_example.py"]
    subprocess.run(command, check=True)
    if (chromium := shutil.which("chromium")) is None:
        print("no chromium on the PATH: the picture stays as it is", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}"]
        options += [f"--window-size={WINDOW}", f"--screenshot={PICTURE}"]
        subprocess.run([chromium, *options, PAGE.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
