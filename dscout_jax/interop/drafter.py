"""DFlash drafter folders: config.json, 11 L + 3 tensors, and what they were made from."""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dscout_jax.config import ARCHITECTURES, DrafterConfig, TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import names
from dscout_jax.interop.folders import whole_folder
from dscout_jax.interop.huggingface import Place, read_params
from dscout_jax.interop.safetensors import TensorFolder, listing, read_json, write_json, write_tensors

PROVENANCE = "dscout.json"
DRAFT_IDS = "draft_ids.json"
_TEXT_TOKENS = ("bos_token", "eos_token", "pad_token")
# Parts of tensor names that belong to relatives of DFlash whose drafts would come out wrong.
_FOREIGN = {
    "attention_conv": "DFlash2 convolutions are not implemented",
    "mlp_conv": "DFlash2 convolutions are not implemented",
    "candidate_selector": "DFlash2's candidate selector is not implemented",
    "d2t": "a reduced draft vocabulary is not implemented",
    "t2d": "a reduced draft vocabulary is not implemented",
    "embed_tokens": "a DFlash drafter uses the target's embedding",
    "lm_head": "a DFlash drafter uses the target's output head",
}
# Flags of config.json with which a slot sees or predicts another token.
_OTHER_BLOCKS = ("is_causal", "causal", "sample_from_anchor")


def save_drafter(
    folder: str | Path,
    config: DrafterConfig,
    params: Mapping[str, Any],
    provenance: Mapping[str, Any] | None = None,
    dtype: Any = jnp.bfloat16,
    special_ids: Mapping[str, int | Sequence[int]] | None = None,
    draft_ids: Sequence[int] | None = None,
) -> Path:
    """Writes a DFlash folder that serving engines load; it appears when it is whole.

    With softmax fusion the folder is ours alone: its README says so, and its architecture has another name.

    Args:
        params: the drafter's tree; exactly the tensors of `config`, 11 L + 3 of them in DFlash's own form.
        provenance: what the drafter was made from, kept in dscout.json; "target" names the target.
        dtype: bf16, fp16 or fp32 of the stored tensors; None leaves each in its own, one of these.
        special_ids: the tokenizer's, such as {"eos_token": 2}; written, and the mask id checked against them.
        draft_ids: the ids that it was trained to draft, kept in draft_ids.json; None: the whole vocabulary.
            Engines that do not know the file draft from the whole vocabulary.

    Raises:
        UserError: tensors that do not fit, values that are not finite or too large for `dtype`, a mask id
            that text uses, or a folder that holds something else.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PROVENANCE).is_file():
        raise UserError(f"{folder} holds other files and is no earlier export; name a new folder")
    given = special_ids or {}
    special = {f"{name}_id": given[name] for name in _TEXT_TOKENS if name in given}
    _check_mask(config, special)
    flat = names.flatten(params)
    expected = names.drafter_shapes(config)
    shapes = {path: np.shape(value) for path, value in flat.items()}
    if shapes != expected:
        odd = {path for path in shapes | expected if shapes.get(path) != expected.get(path)}
        raise UserError(f"the parameters do not fit the drafter's config at {listing(odd)}")
    tensors = {}
    for path, value in flat.items():
        host = np.asarray(jax.device_get(value))
        if not np.isfinite(host.astype(np.float32)).all():
            raise UserError(f"{path} holds values that are not finite; export an earlier checkpoint")
        with np.errstate(over="ignore"):  # told below, by name
            stored = host.astype(dtype or host.dtype)
        if not np.isfinite(stored.astype(np.float32)).all():
            raise UserError(f"{path} holds values that {stored.dtype.name} does not; export another dtype")
        tensors[names.to_hf(path, names.DRAFTER_PREFIX)] = stored
    with whole_folder(folder) as part:
        # Of unlike tensors the matrices' dtype counts; older readers know torch_dtype only.
        kind = tensors["layers.0.mlp.up_proj.weight"].dtype.name
        write_json(part / "config.json", config.to_hf() | special | {"dtype": kind, "torch_dtype": kind})
        write_tensors(part, tensors)
        if draft_ids is not None:
            write_json(part / DRAFT_IDS, [int(i) for i in draft_ids])
        about = {
            "library": "dscout-jax",
            "version": _version(),
            "sha256": {file.name: _sha256(file) for file in sorted(part.glob("*.safetensors"))},
            "provenance": dict(provenance or {}),
        }
        write_json(part / PROVENANCE, about)
        drafted = None if draft_ids is None else len(draft_ids)
        readme = _readme(config, folder.name, provenance or {}, drafted)
        (part / "README.md").write_text(readme, encoding="utf-8")
    return folder


def load_drafter(
    folder: str | Path, dtype: Any = None, place: Place | None = None
) -> tuple[DrafterConfig, dict[str, Any]]:
    """Loads a DFlash folder, ours or another project's.

    Args:
        dtype: cast to this; None keeps what is stored.
        place: puts one tensor on devices, see `load_target`.

    Raises:
        UserError: a relative of DFlash that drafts otherwise, a config or tensors that do not fit, a mask id
            that text uses, a damaged file.
    """
    folder = Path(folder).expanduser()
    raw = read_json(folder / "config.json")
    tensors = TensorFolder(folder)
    _refuse_relatives(folder, raw, tensors)
    config = DrafterConfig.from_hf(raw)
    _check_mask(config, raw)
    prefix = "model." if all(name.startswith("model.") for name in tensors.shapes) else names.DRAFTER_PREFIX
    expected = {names.to_hf(path, prefix): shape for path, shape in names.drafter_shapes(config).items()}
    _check_fc(folder, config, tensors.shapes.get(f"{prefix}fc.weight"))
    tensors.check(expected)
    _check_sums(folder)
    return config, read_params(tensors, expected, prefix, dtype, place)


def load_provenance(folder: str | Path) -> dict[str, Any]:
    """What dscout.json says the drafter was made from; empty for another project's folder."""
    path = Path(folder).expanduser() / PROVENANCE
    return dict(read_json(path).get("provenance") or {}) if path.is_file() else {}


def load_draft_ids(folder: str | Path) -> list[int] | None:
    """The ids that a drafter was trained to draft; None: the whole vocabulary.

    Raises:
        UserError: the file is no list of ids.
    """
    path = Path(folder).expanduser() / DRAFT_IDS
    if not path.is_file():
        return None
    try:
        return [int(i) for i in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no list of token ids: {error}") from None


def check_pair(drafter: DrafterConfig, target: TargetConfig, special_ids: Mapping[str, int]) -> None:
    """Refuses a drafter that was made for another target, or whose mask id this target's text uses.

    Raises:
        UserError: naming what differs.
    """
    drafter.check_target(target)
    stops: dict[str, Any] = {"eos_token_id": list(target.eos_ids)}
    _check_mask(
        drafter, {f"{name}_id": id for name, id in special_ids.items() if name != "eos_token"} | stops
    )


def _check_mask(config: DrafterConfig, ids: Mapping[str, Any]) -> None:
    """A mask id that also pads or ends text would teach the drafter that hidden slots mean it."""
    for name in (f"{token}_id" for token in _TEXT_TOKENS):
        used = ids.get(name)
        if config.mask_token_id in (used if isinstance(used, Sequence) else [used]):
            raise UserError(f"mask_token_id {config.mask_token_id} is also the {name}; name an unused id")


def _refuse_relatives(folder: Path, raw: Mapping[str, Any], tensors: TensorFolder) -> None:
    fusion = (raw.get("dflash_config") or {}).get("fusion", "fc")
    if fusion not in ARCHITECTURES:
        raise UserError(f"{folder}: fusion {fusion!r} is not implemented")
    known = raw.get("architectures") or [ARCHITECTURES[fusion]]
    if ARCHITECTURES[fusion] not in known:
        raise UserError(
            f"{folder}: architectures {known} is not {ARCHITECTURES[fusion]}; it is another kind of drafter"
        )
    for name in sorted(tensors.shapes):
        for part in set(name.split(".")) & set(_FOREIGN):
            raise UserError(f"{folder}: tensor {name} is refused: {_FOREIGN[part]}")
    nested = raw.get("dflash_config") or {}
    flags = [name for name in _OTHER_BLOCKS if raw.get(name) or nested.get(name)]
    if flags:
        raise UserError(f"{folder}: {', '.join(flags)} is set; its blocks mean something else than DFlash's")
    reduced = raw.get("draft_vocab_size")
    if reduced is not None and reduced != raw.get("vocab_size"):
        raise UserError(
            f"{folder}: draft_vocab_size {reduced}: a reduced draft vocabulary is not implemented"
        )


def _check_fc(folder: Path, config: DrafterConfig, shape: tuple[int, ...] | None) -> None:
    width = config.hidden_size
    taps = len(config.target_layer_ids)
    if shape is not None and shape != (width, taps * width):
        raise UserError(
            f"{folder}: fc.weight is {list(shape)}; {taps} target_layer_ids of width {width} ask for "
            f"{[width, taps * width]}"
        )


def _check_sums(folder: Path) -> None:
    path = folder / PROVENANCE
    sums = read_json(path).get("sha256") or {} if path.is_file() else {}
    for file, digest in sums.items():
        if not (folder / file).is_file() or _sha256(folder / file) != digest:
            raise UserError(f"{folder / file} is not what was exported (SHA-256 differs); export it again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version() -> str:
    try:
        return importlib.metadata.version("dscout-jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _readme(config: DrafterConfig, name: str, provenance: Mapping[str, Any], drafted: int | None) -> str:
    size, target = config.block_size, str(provenance.get("target", "TARGET"))
    serving = _SERVING if config.fusion == "fc" else _NOT_SERVED
    text = f"""# {name}

A DFlash block-diffusion drafter for `{target}`: {config.num_layers} layers, blocks of {size} slots of which
slot 0 holds the last known token and {size - 1} are drafted. It has no embedding and no output head: the
target's are used.
"""
    return (
        text
        + serving.format(target=target, name=name, slots=size, drafts=size - 1)
        + _origin(provenance, drafted)
    )


_SERVING = """
vLLM counts drafted tokens ({drafts}):

```bash
vllm serve {target} --speculative-config \\
  '{{"method": "dflash", "model": "./{name}", "num_speculative_tokens": {drafts}}}'
```

SGLang counts the slots of the block ({slots}):

```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
  --speculative-draft-model-path ./{name} --speculative-num-draft-tokens {slots}
```
"""

_NOT_SERVED = """
vLLM, SGLang and tpu-inference do not serve it: they know the dense `fc` only, and this drafter mixes the
target's layers by softmax weights (`layers.N.fusion.weight`). It decodes here:

```bash
dscout generate PROMPT --target TARGET_FOLDER --drafter {name}
```
"""


def _origin(provenance: Mapping[str, Any], drafted: int | None) -> str:
    """What the README says of where a drafter comes from, as far as it is known."""
    mats = ((provenance.get("heldout") or {}).get("mat") or {}).items()
    facts = {
        "target fingerprint": provenance.get("target_fingerprint"),
        "recipe": provenance.get("recipe"),
        "steps": provenance.get("steps"),
        "accepted tokens a round on held-out answers, the bonus included (MAT)": ", ".join(
            f"{mat:.3f} at blocks of {size}" for size, mat in mats
        ),
        "trained to draft": f"the {drafted} ids of `{DRAFT_IDS}`; who does not read it drafts from all"
        if drafted
        else None,
    }
    lines = [f"- {what}: {value}" for what, value in facts.items() if value not in (None, "")]
    return "\n".join(["", "Where it comes from:", "", *lines, f"- the rest: `{PROVENANCE}`", ""])
