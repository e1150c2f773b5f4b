"""Architectures of transformers, unmodified: at O1, O2 and O5 they train as close to float32 as under torch.autocast.

Tiny models with random weights, on the CPU in bfloat16. Labels are passed to the model, which computes the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from beside_float32 import LEVELS, assert_as_close_to_float32_as_autocast, initialize, region
from helpers import others_slow

import ampkit

transformers = pytest.importorskip("transformers")

VOCABULARY = 32

IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
WORDS = dict(vocab_size=VOCABULARY, **IDS)
TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(max_position_embeddings=64, **TOWER, **WORDS)
GROUPED = {**DECODER, "num_key_value_heads": 2}
OLDER_DECODER = dict(n_layer=2, n_head=4, **WORDS)
ENCODER = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **TOWER)
TEXT_ENCODER = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
SIDE = dict(layers=2, attention_heads=4, ffn_dim=64)
SIDES = [(f"{side}_{name}", n) for side in ("encoder", "decoder") for name, n in SIDE.items()]
TWO_TOWERS = dict(d_model=32, dropout=0.0, **dict(SIDES))
ENCODER_DECODER = dict(decoder_start_token_id=1, forced_eos_token_id=None, **TWO_TOWERS, **WORDS)
T5_SIZES = dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
T5 = dict(dropout_rate=0.0, decoder_start_token_id=0, **T5_SIZES)
WHISPER = dict(
    num_mel_bins=16, max_source_positions=16, max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None
)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
DEBERTA = dict(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm")
NO_DROPOUT = "hidden_dropout activation_dropout attention_dropout feat_proj_dropout final_dropout layerdrop".split()
WAV2VEC2 = dict(
    **dict(vocab_size=VOCABULARY, pad_token_id=0, apply_spec_augment=False, num_conv_pos_embeddings=4),
    **dict(conv_dim=[16, 16], conv_stride=[5, 2], conv_kernel=[10, 3], num_conv_pos_embedding_groups=2),
    **dict.fromkeys(NO_DROPOUT, 0.0),
    **TOWER,
)
CLIP = dict(
    projection_dim=16,
    text_config={**TOWER, **WORDS, "max_position_embeddings": 16, "eos_token_id": VOCABULARY - 1},
    vision_config=dict(image_size=16, patch_size=4, **TOWER),
)


def counting(generator, length=16, starts=VOCABULARY - 3):
    """Return rows of tokens that go up by 1, 2 or 3, from one of the first ``starts``."""
    start = torch.randint(0, starts, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    return 3 + (start + stride * torch.arange(length)) % (VOCABULARY - 3)


def next_token(generator):
    tokens = counting(generator)
    return dict(input_ids=tokens, labels=tokens)


def padded_next_token(generator):
    """Return rows padded on the left, as `generate` takes them."""
    tokens = counting(generator)
    there = torch.arange(16) >= torch.randint(0, 6, (8, 1), generator=generator)
    return dict(input_ids=tokens.where(there, 0), attention_mask=there.long(), labels=tokens.where(there, -100))


def next_token_of_experts(generator):
    """The loss includes the loss that balances the experts."""
    return dict(next_token(generator), output_router_logits=True)


def masked_tokens(generator):
    tokens, hidden = counting(generator, starts=4), torch.arange(16) % 4 == 2
    return dict(input_ids=tokens.where(~hidden, 1), labels=tokens.where(hidden, -100))


def padded_masked_tokens(generator):
    batch, there = masked_tokens(generator), torch.arange(16) < torch.randint(10, 17, (8, 1), generator=generator)
    labels = batch["labels"].where(there, -100)
    return dict(input_ids=batch["input_ids"].where(there, 0), attention_mask=there.long(), labels=labels)


def second_half(generator):
    tokens, there = counting(generator), torch.arange(8) < torch.randint(5, 9, (8, 1), generator=generator)
    first = tokens[:, :8].where(there, 0)
    return dict(input_ids=first, attention_mask=there.long(), labels=tokens[:, 8:].contiguous())


def pictures(number, size):
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(5))


def images(generator):
    """Draw four classes, each a picture under some noise. With more noise, chance decides what is learned next."""
    labels = torch.randint(0, 4, (8,), generator=generator)
    noise = torch.randn(8, 3, 16, 16, generator=generator)
    return dict(pixel_values=pictures(4, 16)[labels] + 0.5 * noise, labels=labels)


def sounds(generator):
    """Draw tokens to be heard, each with a spectrum of its own, four frames long."""
    tokens = counting(generator, length=8)
    spectra = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(5))
    return dict(input_features=spectra[tokens].repeat_interleave(4, 1).transpose(1, 2).contiguous(), labels=tokens)


def waves(generator):
    """Draw tokens to be heard, each with a wave of its own, 40 samples long."""
    tokens = counting(generator, length=4)
    forms = torch.randn(VOCABULARY, 40, generator=torch.Generator().manual_seed(5))
    return dict(input_values=forms[tokens].flatten(1), labels=tokens)


def pairs(generator):
    """Draw eight pictures in any order, each with a text of its own."""
    which = torch.randperm(8, generator=generator)
    texts = 3 + (7 * which[:, None] + torch.arange(8) * (which[:, None] + 1)) % (VOCABULARY - 4)
    ends = torch.full((8, 1), VOCABULARY - 1)
    noisy = pictures(8, 16)[which] + 0.5 * torch.randn(8, 3, 16, 16, generator=generator)
    return dict(input_ids=torch.cat([texts, ends], 1), pixel_values=noisy, return_loss=True)


class Architecture(NamedTuple):
    class_name: str
    settings: dict[str, Any]
    #: Makes a batch of a generator.
    task: Callable[[torch.Generator], dict]
    learning_rate: float = 3e-3


ARCHITECTURES = {
    "Llama": Architecture("LlamaForCausalLM", {**GROUPED, "rope_scaling": LLAMA3}, padded_next_token),
    "Mixtral": Architecture("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, next_token_of_experts),
    "Gemma2": Architecture(
        "Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}, next_token
    ),
    "GPT2": Architecture(
        "GPT2LMHeadModel",
        {**OLDER_DECODER, "n_embd": 32, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        next_token,
    ),
    "BLOOM": Architecture("BloomForCausalLM", {**OLDER_DECODER, "hidden_size": 32}, padded_next_token),
    "Mamba": Architecture(
        "MambaForCausalLM", dict(hidden_size=32, state_size=4, num_hidden_layers=2, **WORDS), next_token
    ),
    "BERT": Architecture("BertForMaskedLM", TEXT_ENCODER, padded_masked_tokens),
    "DeBERTa-v2": Architecture("DebertaV2ForMaskedLM", {**TEXT_ENCODER, **DEBERTA}, padded_masked_tokens),
    "T5": Architecture("T5ForConditionalGeneration", T5, second_half),
    "ViT": Architecture(
        "ViTForImageClassification", {**ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 4}, images
    ),
    "Whisper": Architecture("WhisperForConditionalGeneration", {**ENCODER_DECODER, **WHISPER}, sounds),
    "Wav2Vec2": Architecture("Wav2Vec2ForCTC", WAV2VEC2, waves),
    "CLIP": Architecture("CLIPModel", CLIP, pairs, learning_rate=5e-4),
}
GENERATING = [
    name
    for name, row in ARCHITECTURES.items()
    if row.task in (next_token, padded_next_token, next_token_of_experts, second_half, sounds)
]


def make(row):
    cls = getattr(transformers, row.class_name)
    return cls(cls.config_class(**row.settings))


def loss_of(model, batch):
    return model(**batch).loss


@pytest.mark.parametrize("architecture", others_slow("BERT", "Mixtral", of=ARCHITECTURES))
def test_trains_as_close_to_float32_as_under_autocast(architecture):
    row = ARCHITECTURES[architecture]
    assert_as_close_to_float32_as_autocast(lambda: make(row), loss_of, row.task, row.learning_rate)


def generated(way, row, batch, tokens=4):
    """The tokens that are generated, with the logits [row, token, vocabulary] that they were chosen by."""
    torch.manual_seed(0)
    model = make(row).eval()
    initialize(way, model)
    with region(way):
        output = model.generate(
            **batch,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ampkit.close()
    return output.sequences, torch.stack(output.logits, 1)


@pytest.mark.parametrize("architecture", others_slow("Llama", "T5", "Whisper", of=GENERATING))
@pytest.mark.parametrize("level", LEVELS)
def test_generates_as_close_to_float32_as_under_autocast(architecture, level):
    """`generate` gives an encoder what the script gave it: float32, of which the model's own forward sees nothing.

    The logits of a later token, computed with what is kept of those before, are compared where these are the same.
    """
    row = ARCHITECTURES[architecture]
    batch = row.task(torch.Generator().manual_seed(0))
    batch = {name: value for name, value in batch.items() if name in ("input_ids", "attention_mask", "input_features")}
    sequences, logits = generated("float32", row, batch)

    def distances(way):
        level_sequences, level_logits = generated(way, row, batch)
        assert level_sequences.shape == sequences.shape
        assert level_logits.dtype is torch.float32
        tokens = level_logits.shape[1]
        parted = (level_sequences != sequences)[:, -tokens:].cummax(1).values[:, :-1]
        same = torch.cat([torch.ones(len(level_logits), 1, dtype=torch.bool), ~parted], 1)
        return [
            ((level_logits[same[:, i], i] - logits[same[:, i], i]).norm() / logits[same[:, i], i].norm()).item()
            for i in range(tokens)
            if same[:, i].any()
        ]

    of_level, of_autocast = distances(level), distances("autocast")
    assert 1e-5 < of_level[0]
    assert max(of_level) <= max(0.02, 1.5 * max(of_autocast))
