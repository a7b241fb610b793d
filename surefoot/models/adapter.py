"""An adapter as files: the directory that PEFT reads and writes.

Owns `adapter_config.json` and `adapter_model.safetensors`, both ways, and what is refused of them.
Refuses to own the layers that an adapter lies in (`lora`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from surefoot.errors import ModelError
from surefoot.recipe import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_NAME = ".default."
_REFUSED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
)
"""Keys of PEFT's configuration under which an adapter is more than B A beside linear layers."""


def read(settings: Lora, base_dir: Path | None, *, key: str) -> tuple[Any, dict[str, Tensor]]:
    """PEFT's configuration of a given adapter, and its weights by their names in the file."""
    from peft import LoraConfig, PeftConfig

    folder = _folder(str(settings.path), base_dir, key)
    where = f"{key}.path: {settings.path}"
    if not (folder / WEIGHTS).is_file():
        said = f"holds no {WEIGHTS}"
        if (folder / _PICKLE).is_file():
            said = f"holds only pickled weights ({_PICKLE}), and nothing is unpickled here"
        raise ModelError(f"{where} {said}; save the adapter again as safetensors")
    try:
        config = PeftConfig.from_pretrained(str(folder))
        weights = safetensors.torch.load_file(folder / WEIGHTS)
    except Exception as error:  # the libraries raise whatever their readers do
        said = str(error).split("\n")[0]
        raise ModelError(f"{where} cannot be read ({said}); save the adapter again") from error
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{where} is a {config.peft_type} adapter; only LoRA is trained here")
    facts = config.to_dict()
    odd = [name for name in _REFUSED if facts.get(name)]
    if facts["bias"] != "none":
        odd.append("bias")
    if facts["init_lora_weights"] not in (True, False, "gaussian"):
        odd.append("init_lora_weights")
    if odd:
        raise ModelError(
            f"{where} sets {odd[0]} to {facts[odd[0]]!r}, which is not built; merge it into the "
            "model with PEFT, and train that"
        )
    _agree(settings, facts, where)
    return config, weights


def put(
    weights: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], *, where: str
) -> None:
    """Copy weights by their names in a file into an adapter; all must be there, none more."""
    wanted = {file_name(name): parameter for name, parameter in parameters.items()}
    odd = sorted(set(wanted) ^ set(weights))
    if odd:
        raise ModelError(
            f"{where} does not fit this model: weight {odd[0]} is in one alone; name the model "
            "that the adapter was made for as model.path"
        )
    for name, parameter in wanted.items():
        if parameter.shape != weights[name].shape:
            raise ModelError(
                f"{where} does not fit this model: weight {name} has shape "
                f"{tuple(weights[name].shape)} instead of {tuple(parameter.shape)}; name the model "
                "that the adapter was made for as model.path"
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(weights[name])


def write(
    folder: Path,
    config: Any,
    parameters: Mapping[str, nn.Parameter],
    *,
    base: str,
    revision: str | None,
) -> None:
    """Write the two files that `PeftModel.from_pretrained` reads; `base` is the model below."""
    told = copy.copy(config)
    told.base_model_name_or_path = base
    told.revision = revision
    told.task_type = "CAUSAL_LM"
    told.inference_mode = True
    told.save_pretrained(str(folder))
    named = {
        file_name(name): parameter.detach().cpu().contiguous()
        for name, parameter in parameters.items()
    }
    safetensors.torch.save_file(named, folder / WEIGHTS, metadata={"format": "pt"})


def file_name(name: str) -> str:
    """What PEFT calls a parameter in a file, from its name in a model."""
    return _PREFIX + name.replace(_NAME, ".")


def _folder(path: str, base_dir: Path | None, key: str) -> Path:
    wanted = Path(path).expanduser()
    tried = [base_dir / wanted, wanted] if base_dir is not None else [wanted]
    found = next((place for place in tried if (place / CONFIG).is_file()), None)
    if found is None:
        raise ModelError(
            f"{key}.path: there is no directory {path} with an {CONFIG}; name one that PEFT or "
            "surefoot export wrote (a relative path starts at the recipe's directory, then at the "
            "working directory)"
        )
    return found


def _agree(settings: Lora, facts: Mapping[str, Any], where: str) -> None:
    """What the recipe asks for beside a given adapter must be what that is."""
    own = {"rank": facts["r"], "alpha": facts["lora_alpha"]}
    for name, has in own.items():
        asked, default = getattr(settings, name), Lora.model_fields[name].default
        if asked not in (default, has):
            raise ModelError(
                f"{where} has {name} {has}, and model.lora.{name} is {asked}; leave the key out"
            )
    has_targets = facts["target_modules"] or ()
    if settings.targets and set(settings.targets) != set(has_targets):
        raise ModelError(
            f"{where} lies beside {', '.join(sorted(has_targets))}, and model.lora.targets says "
            f"{', '.join(settings.targets)}; leave the key out"
        )
