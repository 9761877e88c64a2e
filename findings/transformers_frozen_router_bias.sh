#!/usr/bin/env bash
# transformers 5.23.0: from_pretrained makes parameters trainable that the model's own code freezes.
#
# The routers of ERNIE 4.5 MoE have a bias that their code creates with requires_grad=False: training moves it by a rule
# of its own, not by gradients. A model from its config has it so, and so has one that is saved. The same folder read by
# from_pretrained gives the bias with requires_grad=True: an optimizer over what requires a gradient holds other
# parameters, and one process that starts from the config and one that starts from the folder do not train the same.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import sys

import transformers
from transformers import AutoModelForCausalLM
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig

config = Ernie4_5_MoeConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, moe_intermediate_size=8, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
    moe_layer_start_index=0, moe_layer_end_index=1, max_position_embeddings=32, pad_token_id=0,
)


def frozen(model):
    return sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


model = AutoModelForCausalLM.from_config(config)
model.save_pretrained(sys.argv[1])
again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("transformers", transformers.__version__)
print("frozen in a model from its config:", *frozen(model))
print("frozen in the same model from its folder:", *(frozen(again) or ["none"]))
same = all(name.endswith("e_score_correction_bias") for name in frozen(model)) and len(frozen(model)) == 2
sys.exit(0 if same and not frozen(again) else 1)
PYTHON
