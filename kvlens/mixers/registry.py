"""Which mixer is used for which Transformers module. To add one, write a file here and list it in ``MIXERS``."""

from torch import nn

from kvlens.errors import KVLensError
from kvlens.mixers.kimi_linear import KimiMixer
from kvlens.mixers.lfm2 import Lfm2Mixer
from kvlens.mixers.mamba1 import Mamba1Mixer
from kvlens.mixers.mamba2 import Mamba2Mixer
from kvlens.mixers.minimax import MiniMaxMixer
from kvlens.mixers.olmo_hybrid import OlmoHybridMixer
from kvlens.mixers.protocol import Mixer
from kvlens.mixers.qwen3_5 import Qwen35Mixer
from kvlens.mixers.qwen3_next import Qwen3NextMixer

MIXERS: tuple[type[Mixer], ...] = (
    Qwen3NextMixer,
    Qwen35Mixer,
    OlmoHybridMixer,
    KimiMixer,
    MiniMaxMixer,
    Mamba1Mixer,
    Mamba2Mixer,
    Lfm2Mixer,
)


def has_mixer(module: nn.Module) -> bool:
    """Whether there is a mixer for a Transformers module."""
    return _mixer_class(module) is not None


def mixer_for(module: nn.Module, layer: int) -> Mixer:
    """The mixer over ``module``, which is layer ``layer`` of its model.

    Raises:
        KVLensError: there is no mixer for modules of this class.
    """
    found = _mixer_class(module)
    if found is None:
        served = ", ".join(name for mixer in MIXERS for name in mixer.serves)
        raise KVLensError(
            f"layer {layer}: expected a recurrent layer that kvlens computes itself ({served}), got {type(module).__name__}"
        )
    return found(module, layer)


def _mixer_class(module: nn.Module) -> type[Mixer] | None:
    names = {parent.__name__ for parent in type(module).__mro__}
    return next((mixer for mixer in MIXERS if names & set(mixer.serves)), None)
