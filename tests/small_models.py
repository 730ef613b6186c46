"""Small models with random weights."""

from copy import deepcopy

import open_clip
import torch

from c2lip.core import seeded
from c2lip.towers import Towers, load
from c2lip.towers.foreign import register_vit


def small_siglip() -> Towers:
    "A SigLIP of two layers a tower with random weights, always the same, that transformers can express"
    base = load("base")
    text = {"layers": 2, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
    text |= {"norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"}}
    name = "c2lip_vit_w64_l2_h2_m256_p16_i96_gelu"
    register_vit(name)
    config = deepcopy(base.config)
    config["text_cfg"] |= text
    config["vision_cfg"] |= {"timm_model_name": name}
    layers = {key: value for key, value in config.items() if key != "custom_text"}
    with seeded(0):
        model = open_clip.model.CustomTextCLIP(**deepcopy(layers))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)

    open_clip.model.set_model_preprocess_cfg(model, base.preprocess_cfg)
    return Towers(model.eval(), base.tokenizer, config, dict(base.preprocess_cfg), "new")
