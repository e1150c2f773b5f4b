"""Models of transformers built in bfloat16, as ``from_pretrained`` loads checkpoints: does fine-tuning at a small rate learn?"""

import pytest
import torch

import ampkit

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(num_key_value_heads=2, **SIZES), torch_dtype=torch.bfloat16
    ),
    "BERT": lambda: transformers.BertForMaskedLM._from_config(
        transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES),
        torch_dtype=torch.bfloat16,
    ),
}
TOKENS = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(1))


def first_and_last_loss(name, how):
    """Take 100 steps of AdamW from the same bfloat16 weights: at a level, in plain bfloat16, or in plain float32."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    if how == "float32":
        model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    with ampkit.session(
        model, optimizer, how if how in ("O2", "O5") else "O0", enabled=how in ("O2", "O5"), verbosity=0
    ):
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            with ampkit.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.float32 if how == "float32" else torch.bfloat16}
    return losses[0], losses[-1]


@pytest.mark.filterwarnings("ignore:.*torch_dtype.*")
@pytest.mark.parametrize("name", MODELS)
def test_masters_learn_what_float32_learns_and_plain_bfloat16_forgets(name):
    first, last = first_and_last_loss(name, "float32")
    learned = first - last
    assert learned > 0.02 * first  # else a model that learns nothing would be within 2 percent, too
    for level in ("O2", "O5"):
        _, reached = first_and_last_loss(name, level)
        assert reached == pytest.approx(last, rel=0.02)
        assert abs(reached - last) < 0.05 * learned
    start, end = first_and_last_loss(name, "bfloat16")
    assert start - end < 0.5 * learned
