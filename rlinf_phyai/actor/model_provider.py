# SPDX-License-Identifier: Apache-2.0
"""The actor's model: RLinf's own PI0.5, in the sizes that the checkpoint states.

RLinf builds one size of PI0.5 and casts it to bfloat16. A checkpoint whose ``config.json`` has the key ``rlinf_phyai``
(:mod:`rlinf_phyai.models.pi05.stated_sizes`) states other sizes; :func:`build_openpi` builds those with a subclass of RLinf's
model class, in the type stated there. Any other checkpoint gets RLinf's own class. RLinf's loader runs for both, without initialising
what the checkpoint holds (:mod:`rlinf_phyai.actor.model_loading`).
"""

from typing import Any

import torch
from omegaconf import DictConfig
from openpi.models_pytorch.gemma_pytorch import PaliGemmaWithExpertModel
from rlinf.models.embodiment.modules.explore_noise_net import ExploreNoiseNet
from rlinf.models.embodiment.modules.value_head import ValueHead
from rlinf.models.embodiment.openpi import get_model as rlinf_get_model
from rlinf.models.embodiment.openpi.openpi_action_model import OpenPi0ForRLActionPrediction
from torch import nn
from transformers import GemmaForCausalLM, PaliGemmaForConditionalGeneration
from transformers.modeling_utils import no_init_weights
from transformers.models.auto import CONFIG_MAPPING

from rlinf_phyai.actor.model_loading import building
from rlinf_phyai.checkpoint_setup import own_tokenizer, with_stated_sizes
from rlinf_phyai.models.pi05.configuration import NOISE_HEAD_SIZES
from rlinf_phyai.models.pi05.stated_sizes import GemmaSizes, StatedSizes, read_stated_sizes

_CAMERAS = 3  # of the reference model; unused ones are masked


def build_openpi(cfg: DictConfig, torch_dtype: torch.dtype | None = None) -> nn.Module:
    """RLinf's model builder for ``model_type: openpi``.

    Args:
        cfg: the model section (``actor.model``), with ``model_path`` and the subsection ``openpi``.
        torch_dtype: passed on to RLinf.

    Returns:
        an ``OpenPi0ForRLActionPrediction`` with transforms set up, on the CPU.

    Raises:
        CheckpointError: the checkpoint's tensors are not those of the model.
    """
    sizes = read_stated_sizes(cfg.model_path)
    model_class = None if sizes is None else _sized(sizes)
    with building(model_class, f"checkpoint {cfg.model_path}"), own_tokenizer(str(cfg.model_path)):
        return rlinf_get_model(with_stated_sizes(cfg), torch_dtype)


class _SizedPaliGemmaWithExpert(PaliGemmaWithExpertModel):
    """openpi's pair of transformers in any size."""

    def __init__(self, sizes: StatedSizes) -> None:
        nn.Module.__init__(self)
        self._params_dtype = sizes.params_dtype
        vlm = CONFIG_MAPPING["paligemma"]()
        vlm._vocab_size = vlm.image_token_index = sizes.vocab_size
        _set(vlm.text_config, **_gemma_options(sizes.prefix, sizes.vocab_size, adaptive=False))
        _set(
            vlm.vision_config,
            hidden_size=sizes.vision.hidden_size,
            intermediate_size=sizes.vision.intermediate_size,
            num_hidden_layers=sizes.vision.num_layers,
            num_attention_heads=sizes.vision.num_heads,
            patch_size=sizes.vision.patch_size,
            image_size=sizes.vision.image_size,
            projection_dim=sizes.prefix.width,
            projector_hidden_act="gelu_fast",
            torch_dtype="float32",
        )
        self.paligemma = PaliGemmaForConditionalGeneration(config=vlm)
        self.gemma_expert = GemmaForCausalLM(
            config=CONFIG_MAPPING["gemma"](**_gemma_options(sizes.expert, sizes.vocab_size, adaptive=sizes.pi05))
        )
        self.gemma_expert.model.embed_tokens = None  # the expert's inputs are projected actions
        self.to_bfloat16_for_selected_params()

    def to_bfloat16_for_selected_params(self, precision: str = "bfloat16") -> None:
        """Stay in the stated type, whatever RLinf's loader asks for."""
        super().to_bfloat16_for_selected_params(self._params_dtype)  # type: ignore[arg-type]


def _gemma_options(sizes: GemmaSizes, vocab_size: int, adaptive: bool) -> dict[str, Any]:
    return {
        "head_dim": sizes.head_dim,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.mlp_dim,
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.depth,
        "num_key_value_heads": sizes.num_kv_heads,
        "vocab_size": vocab_size,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "float32",
        "use_adarms": adaptive,
        "adarms_cond_dim": sizes.width if adaptive else None,
    }


def _set(config: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _sized(sizes: StatedSizes) -> type[OpenPi0ForRLActionPrediction]:
    """RLinf's model class with these sizes."""

    class SizedOpenPi(OpenPi0ForRLActionPrediction):
        def __init__(self, config: Any) -> None:
            # RLinf's constructor builds the standard size, several GB: on the meta device it costs nothing. What has a
            # size of its own is then replaced; everything else that the constructor sets stays.
            with no_init_weights():
                with torch.device("meta"):
                    super().__init__(config)
                self.paligemma_with_expert = _SizedPaliGemmaWithExpert(sizes)  # every weight comes from the checkpoint
            width = sizes.expert.width
            self.action_in_proj = nn.Linear(sizes.action_dim, width)
            self.action_out_proj = nn.Linear(width, sizes.action_dim)
            if sizes.pi05:
                self.time_mlp_in = nn.Linear(width, width)
                self.time_mlp_out = nn.Linear(width, width)
            else:
                self.state_proj = nn.Linear(sizes.action_dim, width)
                self.action_time_mlp_in = nn.Linear(2 * width, width)
                self.action_time_mlp_out = nn.Linear(width, width)
            if config.add_value_head:
                self.value_head = ValueHead(
                    input_dim=sizes.prefix.width if config.value_after_vlm else width,
                    hidden_sizes=sizes.value_head_sizes,
                    output_dim=1,
                    activation="relu",
                    bias_last=True,
                )
            if config.noise_method == "flow_noise":
                self.noise_head = ExploreNoiseNet(
                    in_dim=width,
                    out_dim=sizes.action_dim,
                    hidden_dims=list(NOISE_HEAD_SIZES),
                    activation_type="tanh",
                    noise_logvar_range=config.noise_logvar_range,
                    noise_scheduler_type="learn",
                )
            for name, module in self.named_modules():  # RLinf's FSDP wrapping policy goes by this attribute
                module._fsdp_wrap_name = name.rpartition(".")[2]
            _refuse_meta(self)

        def get_value_from_vlm(self, prefix_output: torch.Tensor) -> torch.Tensor:
            """The critic after the VLM, for this model's token counts. ``prefix_output`` (B, tokens, width) -> (B,)."""
            image, used = sizes.vision.tokens, self.config.num_images_in_input
            mode = self.config.value_vlm_mode
            if mode == "mean_token":  # the used cameras and the whole prompt, padding included
                pooled = torch.cat([prefix_output[:, : image * used], prefix_output[:, image * _CAMERAS :]], dim=1)
            elif mode == "last_token":
                pooled = prefix_output[:, -1:]
            elif mode == "first_token":
                pooled = prefix_output[:, :1]
            else:
                raise ValueError(f"value_vlm_mode is {mode!r}; allowed: mean_token, last_token, first_token.")
            return self.value_head(pooled.mean(dim=1).to(torch.float32))[:, 0]

    return SizedOpenPi


def _refuse_meta(model: nn.Module) -> None:
    left = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
    if left:
        raise NotImplementedError(
            f"A checkpoint that states its own sizes supports PI0.5 and PI0; {left[0]} and "
            f"{len(left) - 1} more tensors belong to an option without a size there (use_dsrl)."
        )
