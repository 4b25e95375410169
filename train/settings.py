"""What a config file says: one frozen dataclass, checked on construction."""

import dataclasses
import inspect
import runpy
from pathlib import Path
from typing import Any, Literal, get_args

from dscout_jax.config import Fusion
from dscout_jax.errors import UserError
from dscout_jax.initialise import Init
from dscout_jax.models.drafter import Remat
from dscout_jax.objective import Objective

Logger = Literal["tensorboard", "wandb"]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """One training run.

    objective: the three factors of the loss.
    target: a Hugging Face folder, what `dscout convert` made of one, or the embedded "smollm2-135m".
    data: answered rows: JSONL of `dscout regenerate`, or what `dscout pack` made of it; of several files
        ((file, weight), ...), mixed by weight. run: the folder that the run writes.
    num_layers, block_size, target_layer_ids, mask_token_id: the drafter; None takes the defaults.
    fusion: of the tapped layers: "fc", dense and served by other engines; "softmax", a few weights a layer.
    init: "target" starts from the target's last layers, "fresh" from noise; a drafter's folder, ours or
        another project's, from that drafter; a run, trained or imported, from its newest checkpoint.
    seq_len: tokens a row is cut and padded to. batch: rows a step, in `accumulation` parts.
    num_anchors: blocks a row; or query_budget: slots that a row's blocks may have together, by which recipes
        of unlike horizons are given equal work. One of the two.
    steps, learning_rate, warmup (share of steps), clip (global norm), weight_decay: AdamW, cosine to 0.
    dtype: of the target and of the drafter's products; masters are fp32.
    cache_features: keeps the target's features of every row in host memory after their first use.
    features: a folder that `dscout features` wrote: they are read from there and not computed.
    train_vocab: "seen" scores and later drafts only ids that occur in the answers (faster where the head is
        most of the work, as on small machines), "full" all. draft_vocab: with "seen", only so many of the
        most frequent ids are drafted: rare ones cost every round more than they give; None: all seen.
    heldout: last rows of the data, never trained on; evaluated every `eval_every` steps.
    save_every: steps that a sudden death costs at the most. A checkpoint is begun after each half of them and
        after each evaluation, and is whole before the next is begun; the newest `keep` are kept and the best.
    chunk: rows through the head at a time. attention_chunk: blocks of a row that attend at a time, at the
        most; None: all. remat: what the backward pass computes again instead of keeping it.
    anchor_chunk: blocks of a row that go through all draft layers at a time, at the most, so that memory does
        not grow with their number; None: all. For whole weights on each device.
    scan_layers: of target and drafter, one compiled and gathered at a time; for large ones on accelerators.
    mesh: devices along (data, fsdp, tensor); None: as few shares of the weights as the memory asks for. The
        target is read straight into its places.
    loggers: "tensorboard", "wandb": beside metrics.jsonl. profile: first and last step of a trace.
    """

    objective: Objective
    data: str | tuple[tuple[str, float], ...]
    run: str
    target: str = "smollm2-135m"
    num_layers: int = 2
    block_size: int = 8
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    fusion: Fusion = "fc"
    init: Init | str = "target"
    seq_len: int = 384
    batch: int = 8
    accumulation: int = 1
    num_anchors: int | None = None
    query_budget: int | None = None
    steps: int = 1000
    learning_rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    cache_features: bool = True
    features: str | None = None
    train_vocab: Literal["full", "seen"] = "full"
    draft_vocab: int | None = None
    heldout: int = 16
    eval_every: int = 250
    save_every: int = 250
    keep: int = 2
    chunk: int = 512
    attention_chunk: int | None = None
    anchor_chunk: int | None = None
    remat: Remat = "none"
    scan_layers: bool = False
    mesh: tuple[int, int, int] | None = None
    loggers: tuple[Logger, ...] = ()
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch", "accumulation", "steps", "num_layers", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, least in (("eval_every", 1), ("save_every", 2), ("keep", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.batch % self.accumulation:
            raise UserError(f"batch {self.batch} is not divisible by accumulation {self.accumulation}")
        if (self.num_anchors is None) == (self.query_budget is None):
            raise UserError("give num_anchors or query_budget: either says how many blocks a row has")
        for name in ("num_anchors", "query_budget", "attention_chunk", "anchor_chunk"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.anchor_chunk is not None and self.scan_layers:
            raise UserError(
                "anchor_chunk takes a chunk through all layers, scan_layers all chunks through a layer: set "
                "one of them, and where weights are split scan_layers with attention_chunk"
            )
        if self.remat not in get_args(Remat):
            raise UserError(f"remat {self.remat!r} must be one of {', '.join(get_args(Remat))}")
        if not 0 <= self.warmup < 1 or self.learning_rate <= 0 or self.clip <= 0 or self.weight_decay < 0:
            raise UserError("0 <= warmup < 1, learning_rate > 0, clip > 0 and weight_decay >= 0 must hold")
        if max(self.objective.horizon.choices) > self.block_size:
            raise UserError(
                f"objective {self.objective.name!r} has horizons {self.objective.horizon.choices} beyond "
                f"block_size {self.block_size}; build it for that block size"
            )
        self.objective.horizon.spread(self.anchors)  # refuses too few
        if self.anchors > self.seq_len:
            raise UserError(f"{self.anchors} blocks a row exceed seq_len {self.seq_len}; lower num_anchors")
        if self.draft_vocab is not None and (self.draft_vocab < 1 or self.train_vocab == "full"):
            raise UserError(
                f"draft_vocab {self.draft_vocab} picks among the ids seen: it must be at least 1, and "
                'train_vocab must be "seen"'
            )
        if not isinstance(self.data, str) and not all(weight > 0 for _, weight in self.data):
            raise UserError(f"data {self.data}: the weight of each file must be positive")
        if odd := set(self.loggers) - set(get_args(Logger)):
            raise UserError(f"loggers {sorted(odd)} are not of {', '.join(get_args(Logger))}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise UserError(f"profile {self.profile}: name a first and a last step, counted from 1")
        if self.heldout < 0:
            raise UserError(f"heldout is {self.heldout}; it must be 0 or more")

    @property
    def anchors(self) -> int:
        """Blocks a row."""
        return self.num_anchors or self.objective.horizon.most(self.query_budget)

    def contract(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be resumed."""
        names = (
            "target num_layers block_size target_layer_ids mask_token_id seq_len batch accumulation init "
            "heldout num_anchors query_budget steps learning_rate warmup clip weight_decay seed dtype "
            "train_vocab"
        )
        # Runs from before there was a choice of fusion go on.
        fusion = ["fusion"] if self.fusion != "fc" else []
        return {n: _plain(getattr(self, n)) for n in [*names.split(), *fusion, "objective"]}


def _plain(value: Any) -> Any:
    """As JSON that two equal settings share; a function is its name and the options it was made with."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(value):
        made_with = inspect.getclosurevars(value).nonlocals if inspect.isfunction(value) else {}
        return {getattr(value, "__qualname__", repr(value)): {k: _plain(v) for k, v in made_with.items()}}
    return value


def run_file(path: str | Path) -> dict[str, Any]:
    """What the names of a config file stand for once it has run.

    Raises:
        UserError: no such file, or it fails.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} is no config file; see the folder configs/")
    try:
        return runpy.run_path(str(path))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} does not run: {type(error).__name__}: {error}") from error


def load_settings(path: str | Path) -> TrainSettings:
    """Runs a config file and returns its `config`.

    Raises:
        UserError: as `run_file`, or it defines no TrainSettings named `config`.
    """
    found = run_file(path)
    config = found.get("config")
    if not isinstance(config, TrainSettings):
        other = "; its `ladder` is for `dscout ladder` and `dscout explain`" if "ladder" in found else ""
        raise UserError(f"{path} defines no `config = TrainSettings(...)`{other}")
    return config
