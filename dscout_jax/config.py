"""Shapes of targets and drafters: frozen dataclasses, to and from Hugging Face `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dscout_jax.errors import UserError

# Types of frequency scaling, and the numbers that each must be given.
_ROPE_OPTIONS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base `theta` and the frequency scaling `kind`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Reads every spelling: `rope_theta`, `rope_parameters`, `rope_theta` + `rope_scaling`.

        Raises:
            UserError: no theta at all, two spellings that disagree on anything, a scaling that is not
                implemented or that lacks one of its numbers.
        """
        given = _rope_options(hf)
        if "rope_theta" not in given:
            raise UserError("config.json names no rope_theta (top level or in rope_parameters); add it")
        kind = given.get("rope_type", "default")
        if kind not in _ROPE_OPTIONS:
            raise UserError(f"RoPE type {kind!r} is not implemented; implemented: {', '.join(_ROPE_OPTIONS)}")
        if kind == "default" and given.get("factor", 1.0) != 1.0:
            raise UserError(f"config.json scales RoPE by factor {given['factor']} but names no rope_type")
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(f"partial_rotary_factor {given['partial_rotary_factor']} is not implemented")
        lacks = [name for name in _ROPE_OPTIONS[kind] if name not in given]
        if lacks:
            raise UserError(f"config.json lacks {', '.join(lacks)} of RoPE type {kind!r}; add it")
        numbers = {name: float(given[name]) for name in _ROPE_OPTIONS[kind]}
        if kind == "llama3":
            original = given.get("original_max_position_embeddings") or hf.get("max_position_embeddings")
            if original is None:
                raise UserError("config.json lacks original_max_position_embeddings of RoPE type 'llama3'")
            numbers["original_max_position"] = int(original)
        return cls(theta=float(given["rope_theta"]), kind=kind, **numbers)

    def to_hf(self) -> dict[str, Any]:
        """Both spellings, so that old and new readers find theirs."""
        if self.kind == "default":
            scaling = None
        elif self.kind == "linear":
            scaling = {"rope_type": "linear", "factor": self.factor}
        else:
            scaling = {
                "rope_type": "llama3",
                "factor": self.factor,
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_position,
            }
        parameters = {"rope_theta": self.theta, **(scaling or {"rope_type": "default"})}
        return {"rope_theta": self.theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _rope_options(hf: Mapping[str, Any]) -> dict[str, Any]:
    """All that a config.json says of RoPE, whatever the spelling; two that disagree are refused."""
    spelled = {name: dict(hf.get(name) or {}) for name in ("rope_parameters", "rope_scaling")}
    for where, options in spelled.items():
        if any(isinstance(value, Mapping) for value in options.values()):
            raise UserError(f"config.json gives {where} by layer type {sorted(options)}: not implemented")
        if "type" in options:  # the older name; a file may give both
            kind = options.pop("type")
            if options.setdefault("rope_type", kind) != kind:
                raise UserError(f"{where} has rope_type {options['rope_type']!r} and type {kind!r}; keep one")
    given: dict[str, Any] = {}
    for where, options in (("top level", {"rope_theta": hf.get("rope_theta")}), *spelled.items()):
        for name, value in options.items():
            if value is None:
                continue
            if given.setdefault(name, value) != value:
                raise UserError(
                    f"config.json gives {name} twice and differently: {given[name]!r}, and {value!r} in "
                    f"{where}; keep one"
                )
    return given


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """What a target and a drafter have in common."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} must be even: RoPE rotates pairs")

    def _shapes_to_hf(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            **self.rope.to_hf(),
        }


def _shapes_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    try:
        heads, width = int(hf["num_attention_heads"]), int(hf["hidden_size"])
        shapes = {
            "vocab_size": int(hf["vocab_size"]),
            "hidden_size": width,
            "intermediate_size": int(hf["intermediate_size"]),
            "num_layers": int(hf["num_hidden_layers"]),
            "num_heads": heads,
            "num_kv_heads": int(hf.get("num_key_value_heads") or heads),
            "head_dim": int(hf.get("head_dim") or width // heads),
            "rms_norm_eps": float(hf["rms_norm_eps"]),
            "max_position": int(hf["max_position_embeddings"]),
        }
    except KeyError as missing:
        raise UserError(f"config.json lacks {missing}; is it a decoder's config?") from None
    for name, neutral in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if hf.get(name, neutral) != neutral:
            raise UserError(f"config.json sets {name}={hf[name]!r}; only {neutral!r} is implemented")
    kinds = set(hf.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"} or hf.get("use_sliding_window"):
        raise UserError(f"sliding-window layers are not implemented (layer_types {sorted(kinds)})")
    return shapes | {"rope": RopeConfig.from_hf(hf)}


@dataclasses.dataclass(frozen=True)
class TargetConfig(_Shapes):
    """A Llama or Qwen3 decoder. `qk_norm` marks Qwen3; `eos_ids` are the stop tokens."""

    qk_norm: bool
    tie_embeddings: bool
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "TargetConfig":
        """Raises UserError for an architecture or option that is not implemented."""
        kind = hf.get("model_type")
        if kind not in ("llama", "qwen3"):
            raise UserError(f"model_type {kind!r} is not implemented; implemented: llama, qwen3")
        eos = hf.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
        return cls(
            **_shapes_from_hf(hf),
            qk_norm=kind == "qwen3",
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            eos_ids=eos_ids,
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this target."""
        kind, name = ("qwen3", "Qwen3ForCausalLM") if self.qk_norm else ("llama", "LlamaForCausalLM")
        return {
            "architectures": [name],
            "model_type": kind,
            **self._shapes_to_hf(),
            "tie_word_embeddings": self.tie_embeddings,
            "eos_token_id": list(self.eos_ids),
        }


def default_target_layers(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Tapped layers: one draft layer -> [n // 2]; else round(1 + i (n - 4) / (d - 1)), i = 0..d-1.

    Raises:
        UserError: the target is too shallow for that many different layers.
    """
    n, d = num_target_layers, num_draft_layers
    ids = (n // 2,) if d == 1 else tuple(round(1 + i * (n - 4) / (d - 1)) for i in range(d))
    if len(set(ids)) < len(ids) or min(ids) < 0:
        raise UserError(
            f"a target of {n} layers has no {d} different default taps ({ids}); name target_layer_ids"
        )
    return ids


Fusion = Literal["fc", "softmax"]
# Engines know a drafter by its architecture: what they would serve wrongly must not bear DFlash's name.
ARCHITECTURES: dict[str, str] = {"fc": "DFlashDraftModel", "softmax": "DScoutDraftModel"}


@dataclasses.dataclass(frozen=True)
class DrafterConfig(_Shapes):
    """A DFlash drafter: `block_size` slots (the anchor included), fed by `target_layer_ids`.

    fusion: how the tapped features become the context: "fc", one dense projection of all of them for every
        draft layer (DFlash's own); "softmax", a weighted mean of them for each draft layer.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    fusion: Fusion = "fc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion not in get_args(Fusion):
            raise UserError(
                f"fusion {self.fusion!r} is not implemented; one of {', '.join(get_args(Fusion))}"
            )
        if self.block_size < 2:
            raise UserError(f"block_size {self.block_size} must be at least 2: slot 0 is the anchor")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask_token_id {self.mask_token_id} lies outside the embedding of {self.vocab_size} rows"
            )
        last = self.num_target_layers - 1
        bad = [i for i in self.target_layer_ids if not 0 <= i < last]
        if bad or not self.target_layer_ids:
            raise UserError(
                f"target_layer_ids {list(self.target_layer_ids)} must be one or more of 0..{last - 1}: "
                f"the target has {self.num_target_layers} layers, and the last one's output is only seen "
                "after the final norm"
            )

    def check_target(self, target: TargetConfig) -> None:
        """Raises UserError, naming what differs, for a drafter that was made for another target."""
        pairs = {
            "hidden_size": (target.hidden_size, self.hidden_size),
            "vocab_size": (target.vocab_size, self.vocab_size),
            "number of target layers": (target.num_layers, self.num_target_layers),
        }
        odd = [f"{name} {theirs} against {mine}" for name, (theirs, mine) in pairs.items() if theirs != mine]
        if odd:
            raise UserError(
                f"the drafter was made for another target (target against drafter: {'; '.join(odd)}); "
                "load that target"
            )

    @classmethod
    def for_target(
        cls,
        target: TargetConfig,
        *,
        num_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...] | None = None,
        fusion: Fusion = "fc",
    ) -> "DrafterConfig":
        """A drafter with the widths of `target`. A mask that is a stop token is refused."""
        if mask_token_id in target.eos_ids:
            raise UserError(f"mask_token_id {mask_token_id} is a stop token of the target; name an unused id")
        shared = {f.name: getattr(target, f.name) for f in dataclasses.fields(_Shapes)}
        ids = target_layer_ids or default_target_layers(target.num_layers, num_layers)
        return cls(
            **shared | {"num_layers": num_layers},
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(ids),
            num_target_layers=target.num_layers,
            fusion=fusion,
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DrafterConfig":
        """Raises UserError when a field is missing, doubled with another value, or not implemented."""
        nested = dict(hf.get("dflash_config") or {})
        sizes = {int(m["block_size"]) for m in (hf, nested) if m.get("block_size") is not None}
        if len(sizes) != 1:
            raise UserError(f"config.json must give one block_size; found {sorted(sizes) or 'none'}")
        for name in ("mask_token_id", "target_layer_ids"):
            if nested.get(name) is None:
                raise UserError(f"config.json lacks dflash_config.{name}")
        if hf.get("num_target_layers") is None:
            raise UserError("config.json lacks num_target_layers")
        if hf.get("is_causal") or nested.get("causal") or nested.get("sample_from_anchor"):
            raise UserError("causal blocks and sample_from_anchor drafters are not implemented")
        return cls(
            **_shapes_from_hf(hf),
            block_size=sizes.pop(),
            mask_token_id=int(nested["mask_token_id"]),
            target_layer_ids=tuple(int(i) for i in nested["target_layer_ids"]),
            num_target_layers=int(hf["num_target_layers"]),
            fusion=nested.get("fusion", "fc"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of a drafter's folder, block size in both places."""
        dense = self.fusion == "fc"
        return {
            "architectures": [ARCHITECTURES[self.fusion]],
            "model_type": "qwen3",
            **({"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}} if dense else {}),
            **self._shapes_to_hf(),
            "num_target_layers": self.num_target_layers,
            "layer_types": ["full_attention"] * self.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
                **({} if dense else {"fusion": self.fusion}),
            },
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        }
