"""transformers' Trainer with ``half_precision_backend="apex"``; 4.57 is the last line that has it."""

import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
if not transformers.__version__.startswith("4."):
    pytest.skip(
        f"transformers {transformers.__version__} has no apex backend; `make clients` installs 4.57",
        allow_module_level=True,
    )

SCRIPT = """
import sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
                    max_position_embeddings=16)
model = BertForSequenceClassification(config)
data = [
    {"input_ids": torch.randint(1, 50, (8,)), "attention_mask": torch.ones(8, dtype=torch.long), "labels": i % 2}
    for i in range(12)
]
arguments = TrainingArguments(
    sys.argv[2], fp16=True, half_precision_backend="apex", fp16_opt_level=sys.argv[1], use_cpu=True, max_steps=6,
    per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[], logging_steps=1, save_strategy="no",
    learning_rate=1e-2,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
assert trainer.use_apex
seen = set()
for layer in model.modules():
    if isinstance(layer, torch.nn.Linear):
        layer.register_forward_hook(lambda module, args, out: seen.add(str(out.dtype)))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("RESULT", sorted(seen), losses[-1] < losses[0], len(losses))
from apex import amp
print("SCALERS", len(amp.state_dict()))
"""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_trainer_runs_in_mixed_precision(tmp_path, level):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ampkit", "run", str(script), level, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RESULT ['torch.float16'] True 6" in done.stdout
    assert f"Selected optimization level {level}" in done.stdout
