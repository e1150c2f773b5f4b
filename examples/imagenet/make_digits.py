"""Write scikit-learn's handwritten digits, 1,797 real scans of 8 x 8 pixels, as a folder of images to train on.

$ python make_digits.py digits
digits: 1,433 images in train/, 364 in val/, 10 classes

The split is the same every time and has a fifth of each class in val/. Running it again rewrites the same files.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

EVERY = 5  # of each class, every fifth scan in the order of the dataset goes to val/


def make_digits(folder: Path) -> dict[str, int]:
    """Write the images below ``folder``; returns the number of images of each split."""
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # the scans count from 0 to 16
    seen, counts = [0] * 10, {"train": 0, "val": 0}
    for index, (scan, label) in enumerate(zip(pixels, digits.target)):
        split = "val" if seen[label] % EVERY == 0 else "train"
        seen[label] += 1
        counts[split] += 1
        path = folder / split / str(label) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scan).save(path)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the handwritten digits of scikit-learn as an ImageFolder.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="gets train/ and val/")
    folder = parser.parse_args().folder
    counts = make_digits(folder)
    print(f"{folder}: {counts['train']:,} images in train/, {counts['val']:,} in val/, 10 classes")
