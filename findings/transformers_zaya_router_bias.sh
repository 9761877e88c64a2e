#!/usr/bin/env bash
# transformers 5.23.0: from_pretrained changes the last of ZAYA's saved router biases.
#
# The routers of ZAYA save `balancing_biases` with the weights. Their _init_weights sets the last of them to -1 by an
# assignment, which from_pretrained, unlike for what transformers.init sets, makes after it has read the file: a folder
# whose last bias is another value computes with -1, and no key is reported.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, ZayaConfig

config = ZayaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=1,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
model = AutoModelForCausalLM.from_config(config)
name = next(name for name, _ in model.named_buffers() if name.endswith("balancing_biases"))
with torch.no_grad():
    model.get_buffer(name).copy_(torch.linspace(0.1, 0.5, model.get_buffer(name).numel()))
model.save_pretrained(sys.argv[1])
again, report = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
print("transformers", transformers.__version__, name, report)
print("saved:", model.get_buffer(name).tolist())
print("read: ", again.get_buffer(name).tolist())
saved, read = model.get_buffer(name), again.get_buffer(name)
sys.exit(0 if torch.equal(saved[:-1], read[:-1]) and read[-1] == -1.0 and saved[-1] == 0.5 else 1)
PYTHON
