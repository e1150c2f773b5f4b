"""PEFT's adapters on a base in float32 and in bfloat16: as far from float32 as torch.autocast on the same base."""

import contextlib
import copy

import pytest
import torch
from helpers import backward

import ampkit

transformers = pytest.importorskip("transformers", reason="`make clients` installs transformers")
peft = pytest.importorskip("peft", reason="`make clients` installs peft")

TOKENS = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(1))
ADAPTERS = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rsLoRA on all": {"use_rslora": True, "target_modules": "all-linear"},
    "LoRA with biases": {"bias": "lora_only"},
}


def adapted(kind, base):
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(base)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **ADAPTERS[kind]}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings)).train()
    return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def train(model, optimizer, how, steps=10):
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        if how.startswith("O"):
            backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()


def saved(model):
    return {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}


def trained(kind, how, base):
    model, optimizer = adapted(kind, base)
    if how.startswith("O"):
        ampkit.initialize(model, optimizer, opt_level=how, verbosity=0)
    train(model, optimizer, how)
    values = saved(model)
    ampkit.close()
    assert {value.dtype for value in values.values()} == {torch.float32}
    return torch.cat([value.flatten() for value in values.values()])


@pytest.mark.parametrize("level", ("O1", "O2", "O4", "O5"))
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_train_as_well_as_under_autocast(kind, level):
    exact, cast = (trained(kind, how, torch.float32) for how in ("float32", "autocast"))
    allowed = 2 * (cast - exact).norm() + 0.005 * exact.norm()
    for base in (torch.float32, torch.bfloat16):
        assert (trained(kind, level, base) - exact).norm() <= allowed


@pytest.mark.parametrize("level", ("O1", "O2", "O5"))
def test_adapters_on_a_base_in_bfloat16_go_on_bit_for_bit(level):
    model, optimizer = adapted("LoRA", torch.bfloat16)
    ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(model, optimizer, level)
    checkpoint = saved(model), copy.deepcopy(optimizer.state_dict())
    again, second = adapted("LoRA", torch.bfloat16)
    train(model, optimizer, level)
    expected = saved(model)
    ampkit.close()
    ampkit.initialize(again, second, opt_level=level, verbosity=0)
    peft.set_peft_model_state_dict(again, checkpoint[0])
    second.load_state_dict(checkpoint[1])
    train(again, second, level)
    found = saved(again)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
