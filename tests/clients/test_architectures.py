"""Architectures of transformers, unmodified: at O1 and O2 they train as close to float32 as under torch.autocast.

Tiny models with random weights, on the CPU in bfloat16. Each is trained by float32, by torch.autocast and by our levels, from the
same weights on the same batches. What is asserted is how far a loss curve is from float32's, not where it goes:
rounding decides that, and two correct ways to round are about as far from each other as each from float32. So that rounding
is not amplified to chaos within 100 steps, the learning rate is small, and Adam's epsilon hides gradients that are zero but for
rounding (of the keys' biases, say, to which softmax is blind); an average over seeds does the rest.
"""

import contextlib

import pytest
import torch
from helpers import others_slow

import ampkit

transformers = pytest.importorskip("transformers")

VOCABULARY = 32

DECODER = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ENCODER = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
T5 = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
WHISPER = dict(
    vocab_size=VOCABULARY,
    num_mel_bins=16,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_source_positions=16,
    max_target_positions=16,
    dropout=0.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)


def counting(generator, length=16):
    """Rows of tokens that go up by 1, 2 or 3, from anywhere."""
    start = torch.randint(0, VOCABULARY - 3, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    return 3 + (start + stride * torch.arange(length)) % (VOCABULARY - 3)


def next_token(generator):
    tokens = counting(generator)
    return dict(input_ids=tokens, labels=tokens)


def masked_tokens(generator):
    tokens, hidden = counting(generator), torch.arange(16) % 4 == 2
    return dict(input_ids=tokens.where(~hidden, 1), labels=tokens.where(hidden, -100))


def second_half(generator):
    tokens = counting(generator)
    return dict(input_ids=tokens[:, :8].contiguous(), labels=tokens[:, 8:].contiguous())


def images(generator):
    """Four classes, each a picture under some noise. With more of it, a batch decides by chance what is learned next."""
    labels = torch.randint(0, 4, (8,), generator=generator)
    pictures = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(8, 3, 16, 16, generator=generator)
    return dict(pixel_values=pictures[labels] + 0.5 * noise, labels=labels)


def sounds(generator):
    """Each token to be heard is a spectrum of its own, four frames long."""
    tokens = counting(generator, length=8)
    spectra = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(5))
    return dict(input_features=spectra[tokens].repeat_interleave(4, 1).transpose(1, 2).contiguous(), labels=tokens)


#: Class of the model, its settings, and its task: a batch of a generator.
ARCHITECTURES = {
    "Llama": ("LlamaForCausalLM", DECODER, next_token),
    "Mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 6}, next_token),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
        next_token,
    ),
    "Qwen2": ("Qwen2ForCausalLM", DECODER, next_token),
    "BERT": ("BertForMaskedLM", {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 32}, masked_tokens),
    "T5": ("T5ForConditionalGeneration", T5, second_half),
    "ViT": ("ViTForImageClassification", {**ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 4}, images),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER, sounds),
}


def copies(generator):
    """The second half repeats the first. The positions are as far from 0 as in a long text: bfloat16 has every fourth of them."""
    half = torch.randint(3, 16, (16, 8), generator=generator)
    labels = torch.cat([torch.full_like(half, -100), half], 1)
    positions = torch.arange(1000, 1016).expand(16, 16)
    return dict(input_ids=torch.cat([half, half], 1), labels=labels, position_ids=positions)


def make(name, seed, settings):
    torch.manual_seed(seed)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**settings)).train()


def losses(model, optimizer, way, batches):
    """The loss of each step; ``way`` is an opt level, ``"autocast"`` or ``"float32"``."""
    region = contextlib.nullcontext()
    if way == "autocast":
        region = torch.autocast("cpu", torch.bfloat16)
    elif way != "float32":
        model, optimizer = ampkit.initialize(model, optimizer, opt_level=way, verbosity=0)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        with region:
            loss = model(**batch).loss
        if way in ("autocast", "float32"):
            loss.backward()
        else:
            with ampkit.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        found.append(loss.item())
    ampkit.close()
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("architecture", others_slow("BERT", of=ARCHITECTURES))
def test_loss_curve_stays_as_close_to_float32_as_autocasts(architecture):
    name, settings, task = ARCHITECTURES[architecture]
    differences = {"autocast": [], "O1": [], "O2": []}
    for seed in (0, 1):

        def curve(way, seed=seed):
            generator = torch.Generator().manual_seed(seed)
            batches = [task(generator) for _ in range(100)]
            model = make(name, seed, settings)
            return losses(model, torch.optim.Adam(model.parameters(), 1e-3, eps=1e-5), way, batches)

        exact = curve("float32")
        for way, found in differences.items():
            found.append(curve(way) - exact)
    distances = {way: torch.cat(found).square().mean().sqrt().item() for way, found in differences.items()}
    assert exact[-10:].mean() < exact[:10].mean()
    assert distances["autocast"] > 1e-5  # far above what float32 itself rounds
    assert distances["O1"] < 1.5 * distances["autocast"]
    assert distances["O2"] < 1.5 * distances["autocast"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_llama_learns_to_copy_as_under_autocast(seed):
    """Its rotary embedding computes angles under ``torch.autocast(..., enabled=False)``: in bfloat16 it cannot learn this.

    Every way has learned it long before the end. From there on the loss falls smoothly, and roundings differ by less than 1%.
    """
    settings = {**DECODER, "vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}

    def final(way):
        generator = torch.Generator().manual_seed(seed)
        batches = [copies(generator) for _ in range(220)]
        model = make("LlamaForCausalLM", seed, {**settings, "max_position_embeddings": 1024})
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        return losses(model, optimizer, way, batches)[-20:].mean().item()

    expected = final("autocast")
    assert expected < 0.004
    assert final("O1") == pytest.approx(expected, rel=0.05)
    assert final("O2") == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("architecture", ["T5", "Whisper"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_generating_calls_the_encoder_on_its_own(architecture, level):
    """`generate` gives the encoder what the script gave it: float32, of which the model's own forward sees nothing."""
    name, settings, task = ARCHITECTURES[architecture]
    batch = task(torch.Generator().manual_seed(0))
    del batch["labels"]
    model = make(name, 0, settings).eval()

    def generated():
        return model.generate(
            **batch, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )

    expected = generated()
    ampkit.initialize(model, opt_level=level, verbosity=0)
    found = generated()
    ampkit.close()
    assert found.sequences.shape == expected.sequences.shape
    first, wanted = found.logits[0], expected.logits[0]
    assert first.dtype is torch.float32
    assert 1e-5 * wanted.norm() < (first - wanted).norm() < 0.02 * wanted.norm()
