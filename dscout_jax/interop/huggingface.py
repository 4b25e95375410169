"""Targets from Hugging Face folders."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from dscout_jax.config import TargetConfig
from dscout_jax.errors import UserError
from dscout_jax.interop import gguf, names
from dscout_jax.interop.safetensors import TensorFolder, read_json
from dscout_jax.interop.tokenizer import Tokenizer, load_tokenizer
from dscout_jax.sharding import spec_of

Place = Callable[[str, np.ndarray, np.dtype], Any]
"""(path, stored values, dtype) -> the array that stands in the tree. The values are a read-only view of the
file: what is not touched is not read."""

CONVERTED = "target.json"
"""Marks a folder that `dscout convert` wrote."""


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run.

    name: what it was loaded as; fingerprint: equal for equal configuration and weights, wherever they lie.
    """

    config: TargetConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    name: str
    fingerprint: str


def load_target(
    source: str | Path = gguf.NAME,
    dtype: Any = jnp.bfloat16,
    cache_dir: str | Path | None = None,
    place: Place | None = None,
) -> LoadedTarget:
    """Loads a Llama or Qwen3 target.

    Args:
        source: a Hugging Face folder (config.json, safetensors, tokenizer.json), or "smollm2-135m", the
            target that a package carries; it is converted once into the cache, as an ordinary folder.
        dtype: what the stored fp32, fp16 or bf16 values are cast to; None keeps what is stored.
        cache_dir: where the converted target lies; default $DSCOUT_CACHE, else ~/.cache/dscout.
        place: puts one tensor on devices, given its path (`layers_0/mlp/up_proj/weight`); `onto(mesh)` is
            one. Default: the default device. Tensors come one at a time.

    Raises:
        UserError: no such folder, a config that is not implemented, tensors that do not fit it.
    """
    folder = target_folder(source, cache_dir)
    config, tokenizer = read_words(folder)
    tensors = TensorFolder(folder)
    shapes = {names.to_hf(path): shape for path, shape in names.target_shapes(config).items()}
    _forget_known_extras(tensors, config)
    tensors.check(shapes)
    digest = hashlib.sha256(json.dumps(_identity(config), sort_keys=True).encode())
    params = read_params(tensors, shapes, names.TARGET_PREFIX, dtype, place, digest)
    return LoadedTarget(config, params, tokenizer, name_of(source, folder), digest.hexdigest())


def read_words(folder: str | Path) -> tuple[TargetConfig, Tokenizer]:
    """A target's shapes and its tokenizer, with one set of stop tokens in both; no weights are read.

    Raises:
        UserError: no readable tokenizer, or one that knows more ids than the embedding has rows.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    config = TargetConfig.from_hf(raw)
    tokenizer = load_tokenizer(folder, _stop_ids(folder, config))
    # Qwen3's tokenizer names none, and its config.json one that drafters carry too.
    if isinstance(raw.get("bos_token_id"), int):
        tokenizer.special_ids.setdefault("bos_token", raw["bos_token_id"])
    if tokenizer.size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer knows {tokenizer.size} ids, the embedding has {config.vocab_size} "
            "rows; tokenizer.json belongs to another model"
        )
    return dataclasses.replace(config, eos_ids=tokenizer.stop_ids), tokenizer


def read_params(
    tensors: TensorFolder,
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
    dtype: Any = None,
    place: Place | None = None,
    digest: Any = None,
) -> dict[str, Any]:
    """Reads the tensors named in `shapes` into a nested dict, one at a time, with a progress bar.

    Args:
        dtype: cast to this; None keeps what is stored.
        digest: a hash that takes in each tensor's name, shape and a sample of its bytes.
    """
    flat = {}
    views = {name: tensors.view(name) for name in sorted(shapes)}
    total = sum(view.nbytes for view in views.values())
    # Without a terminal there is no bar.
    with tqdm(total=total, unit="B", unit_scale=True, desc=tensors.folder.name, disable=None) as bar:
        for name in list(views):
            value = views.pop(name)
            if digest is not None:
                digest.update(f"{name}{value.shape}{value.dtype}".encode())
                digest.update(_sample(value))
            path = names.from_hf(name, prefix)
            kind = value.dtype if dtype is None else np.dtype(dtype)
            flat[path] = (place or _on_default_device)(path, value, kind)
            bar.update(value.nbytes)
    return names.nest(flat)


def _on_default_device(path: str, value: np.ndarray, dtype: np.dtype) -> jax.Array:
    # A copy, never the mapped pages: the file may change while the array lives.
    return jnp.asarray(np.array(value, dtype))


def onto(mesh: Mesh) -> Place:
    """Puts tensors on a mesh by the table of `sharding`, one shard in host memory at a time.

    A device gets its slice of the file and nothing else; copies of one slice on several devices are read
    once each. Several hosts read their own devices' slices.
    """

    def place(path: str, value: np.ndarray, dtype: np.dtype) -> jax.Array:
        sharding = NamedSharding(mesh, spec_of(path, value.shape, mesh))
        shards = []
        for device, index in sharding.addressable_devices_indices_map(value.shape).items():
            shard = jax.device_put(np.array(value[index], dtype), device)
            # The host's copy goes before the next one is made.
            shards.append(shard.block_until_ready())
        return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)

    return place


def as_stored(path: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A `place` that leaves tensors in host memory, as numpy arrays."""
    return np.array(value, dtype)


def default_mask_id(target: LoadedTarget) -> int:
    """An id for hidden slots that no text uses: the mask token, a spare embedding row, an unused token.

    Raises:
        UserError: none is known for this tokenizer.
    """
    tokenizer = target.tokenizer
    if "mask_token" in tokenizer.special_ids:
        return tokenizer.special_ids["mask_token"]
    spare = max(tokenizer.backend.get_vocab(with_added_tokens=True).values()) + 1
    if spare < target.config.vocab_size:
        return spare
    unused = tokenizer.backend.token_to_id(gguf.UNUSED_TOKEN)
    if unused is None:
        raise UserError(f"{target.name} has no mask token and no spare embedding row; name a mask_token_id")
    return unused


def target_folder(source: str | Path, cache_dir: str | Path | None = None) -> Path:
    """The Hugging Face folder of a target: `source` itself, or the embedded target's in the cache.

    Raises:
        UserError: no such folder, or one that holds a converted target.
    """
    if source == gguf.NAME:
        return gguf.embedded_folder(cache_dir)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"{source} is no folder; name a Hugging Face folder (download it first) or {gguf.NAME!r}"
        )
    if (folder / CONVERTED).is_file():
        raise UserError(f"{source} is an Orbax checkpoint; make a Hugging Face folder of it: dscout convert")
    return folder


def name_of(source: str | Path, folder: Path) -> str:
    """What a target is called: the embedded one's name, or its folder's."""
    return str(source) if source == gguf.NAME else folder.resolve().name


def _forget_known_extras(tensors: TensorFolder, config: TargetConfig) -> None:
    """Drops what old exporters add beside the weights, where it says nothing of its own.

    Raises:
        UserError: a head of its own in a folder that declares it tied to the embedding.
    """
    for name in [name for name in tensors.shapes if name.endswith("rotary_emb.inv_freq")]:
        del tensors.shapes[name]
    head, table = names.to_hf("lm_head/weight"), names.to_hf("embed_tokens/weight")
    if config.tie_embeddings and head in tensors.shapes and table in tensors.shapes:
        if not _same_bits(tensors.view(head), tensors.view(table)):
            raise UserError(
                f"{tensors.folder}: tie_word_embeddings is true but {head} differs from the embedding; "
                "set it to false in config.json to use that head"
            )
        del tensors.shapes[head]


def _same_bits(one: np.ndarray, other: np.ndarray, block: int = 2**24) -> bool:
    """Whether two mapped tensors are the same; so many bytes of each are looked at at a time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (x.reshape(-1).view(np.uint8) for x in (one, other))
    return all(np.array_equal(a[i : i + block], b[i : i + block]) for i in range(0, a.size, block))


def _stop_ids(folder: Path, config: TargetConfig) -> tuple[int, ...]:
    """Stop tokens of config.json and of generation_config.json: chat models keep the second list."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    more = () if eos is None else eos if isinstance(eos, list) else (eos,)
    return (*config.eos_ids, *more)


def _identity(config: TargetConfig) -> dict[str, Any]:
    """What a drafter depends on; stop tokens are no part of the weights' identity."""
    return {key: value for key, value in config.to_hf().items() if key != "eos_token_id"}


def _sample(value: np.ndarray, pieces: int = 64, size: int = 256) -> bytes:
    """Evenly spread pieces of a tensor's bytes: training changes all of them, hashing stays cheap."""
    flat = value.reshape(-1).view(np.uint8)
    if flat.size <= pieces * size:
        return flat.tobytes()
    starts = np.linspace(0, flat.size - size, pieces).astype(np.int64)
    return b"".join(flat[s : s + size].tobytes() for s in starts)
