"""The distance of one step's gradients from float32's, with embeddings stored in lower precision and in float32.

Models of transformers, small, with random weights, on the CPU in bfloat16; the relative error of all gradients together.
"""

import contextlib

import torch
import transformers

import ampkit

COMMON = dict(vocab_size=1000)
SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
MODELS = {
    "BertForMaskedLM": dict(SIZES, intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "LlamaForCausalLM": dict(SIZES, intermediate_size=344),
    "GPT2LMHeadModel": dict(n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}
WAYS = {"autocast": {}, "O4": {}, "O5": {}, "O5, embeddings float32": dict(keep_fp32=torch.nn.Embedding)}


def gradients(name, seed, way, settings):
    torch.manual_seed(seed)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**COMMON, **MODELS[name])).train()
    tokens = torch.randint(3, 1000, (4, 64), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    level = way.partition(",")[0] if way.startswith("O") else None
    if level:
        ampkit.initialize(model, optimizer, opt_level=level, verbosity=0, **settings)
    with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else contextlib.nullcontext():
        loss = model(input_ids=tokens, labels=tokens).loss
    with ampkit.scale_loss(loss, optimizer) if level else contextlib.nullcontext(loss) as scaled:
        scaled.backward()
    found = torch.cat([param.grad.float().flatten() for param in model.parameters() if param.grad is not None])
    ampkit.close()
    return found


def main():
    torch.set_num_threads(1)
    for name in MODELS:
        for seed in (0, 1):
            exact = gradients(name, seed, "float32", {})
            errors = {
                way: ((gradients(name, seed, way, its) - exact).norm() / exact.norm()).item()
                for way, its in WAYS.items()
            }
            print(f"{name}, seed {seed}: {', '.join(f'{way} {error:.4f}' for way, error in errors.items())}")


if __name__ == "__main__":
    main()
