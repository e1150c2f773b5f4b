"""Images in, batches on the device out: the folder, the order of samples, the loaders and the prefetcher.

A sample is asked for by (epoch, index), and that key together with the seed decides its crop and flip. So a batch is a
function of (seed, epoch, place in the epoch): the same with any number of workers, and after any resume.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's, for values from 0 to 255


class DataFolderError(Exception):
    """An error for a folder that does not hold what training needs."""


class SeededImageFolder(ImageFolder):
    """An ImageFolder indexed by (epoch, index), which seeds the transforms of each sample by itself."""

    def __init__(self, root: Path, transform: transforms.Compose, seed: int) -> None:
        super().__init__(str(root), transform)
        self.seed = seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = key
        generator = torch.default_generator  # the one that torchvision's transforms draw from
        before = generator.get_state()
        generator.manual_seed(mix_seeds(self.seed, epoch, index))
        try:
            return super().__getitem__(index)
        finally:
            generator.set_state(before)


class TrainOrder:
    """The batches of one epoch as lists of keys: every rank shuffles alike, then takes its share of each batch.

    An incomplete last batch is left out, unless it would be the only one. Call `begin` before iterating.
    """

    def __init__(self, samples: int, batch_size: int, rank: int, world_size: int, seed: int) -> None:
        if samples < world_size:
            raise DataFolderError(
                f"found {samples} training images for {world_size} processes; expected at least one for each."
                f" Add images, or start at most {samples} processes."
            )
        self.samples, self.rank, self.world_size, self.seed = samples, rank, world_size, seed
        self.global_batch = min(batch_size * world_size, samples // world_size * world_size)
        self.batches_per_epoch = samples // self.global_batch
        self.begin(epoch=0, first=0, stop=self.batches_per_epoch)

    def begin(self, epoch: int, first: int, stop: int) -> None:
        """Make the next pass yield batches ``first`` to ``stop`` - 1 of ``epoch``."""
        self.epoch, self.first, self.stop = epoch, first, stop

    def __len__(self) -> int:
        return self.stop - self.first

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        generator = torch.Generator().manual_seed(mix_seeds(self.seed, self.epoch))
        order = torch.randperm(self.samples, generator=generator)
        for batch in range(self.first, self.stop):
            everyone = order[batch * self.global_batch : (batch + 1) * self.global_batch]
            yield [(self.epoch, index) for index in everyone[self.rank :: self.world_size].tolist()]


def val_order(samples: int, batch_size: int, rank: int, world_size: int) -> list[list[tuple[int, int]]]:
    """This rank's batches of keys: over all ranks each sample comes exactly once, so the last batches may be short."""
    keys = [(0, index) for index in range(rank, samples, world_size)]
    return [keys[first : first + batch_size] for first in range(0, len(keys), batch_size)]


def open_folder(root: Path, augment: str, image_size: int, seed: int) -> tuple[SeededImageFolder, SeededImageFolder]:
    """Open the datasets of ``root/train`` and ``root/val``, and check that they belong together."""
    for split in ("train", "val"):
        if not (root / split).is_dir():
            names = sorted(entry.name for entry in root.iterdir())[:8] if root.is_dir() else None
            listing = f"a folder with {', '.join(names) or 'nothing in it'}" if names is not None else "no such folder"
            raise DataFolderError(
                f"found {listing} at '{root}'; expected '{root / split}', with one folder of images per class."
                " Give the folder that holds train/ and val/, or make one with make_digits.py."
            )
    whole = transforms.Resize((image_size, image_size))
    if augment == "imagenet":
        train = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
        val = [transforms.Resize(image_size * 256 // 224), transforms.CenterCrop(image_size)]
    else:
        train = val = [whole]
    # Pixels stay bytes until they are on the device: a quarter of the memory to hand over, and to copy.
    to_bytes = transforms.PILToTensor()
    try:
        train_set = SeededImageFolder(root / "train", transforms.Compose([*train, to_bytes]), seed)
        val_set = SeededImageFolder(root / "val", transforms.Compose([*val, to_bytes]), seed)
    except FileNotFoundError as error:  # no classes, or one without images
        raise DataFolderError(f"found a class folder without images under '{root}': {error}") from error
    if train_set.classes != val_set.classes:
        different = sorted(set(train_set.classes) ^ set(val_set.classes))[:8]
        raise DataFolderError(
            f"found {len(train_set.classes)} classes in '{root / 'train'}' and {len(val_set.classes)} in"
            f" '{root / 'val'}'; expected the same ones. Only in one of them: {', '.join(different)}."
        )
    return train_set, val_set


def make_loader(dataset: SeededImageFolder, batches: TrainOrder | list, workers: int, pin_memory: bool) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # or each pass would draw from the model's random numbers
    )


def prefetch(
    loader: DataLoader, device: torch.device, memory_format: torch.memory_format
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield normalised float32 batches on ``device``; on CUDA the next one is copied while the caller works on this one."""
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=device).view(1, 3, 1, 1)

    def deliver(images: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images = images.to(device, non_blocking=True)
        images = images.to(dtype=torch.float32, memory_format=memory_format).sub_(mean).div_(std)
        return images, target.to(device, non_blocking=True)

    if device.type != "cuda":
        for batch in loader:
            yield deliver(*batch)
        return

    copies, upcoming = torch.cuda.Stream(device), None
    copies.wait_stream(torch.cuda.current_stream(device))  # mean and std are there
    for batch in loader:
        current = upcoming
        with torch.cuda.stream(copies):
            upcoming, ready = deliver(*batch), copies.record_event()
        if current is not None:
            yield _hand_over(*current, device)
        upcoming = (upcoming, ready)
    if upcoming is not None:
        yield _hand_over(*upcoming, device)


def _hand_over(
    batch: tuple[torch.Tensor, torch.Tensor], ready: torch.cuda.Event, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the caller's stream wait for this batch only, not for the copy that follows it."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for tensor in batch:
        tensor.record_stream(stream)  # its memory belongs to the stream of the copies
    return batch


def mix_seeds(*parts: int) -> int:
    """Mix several small numbers into one 64-bit seed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
