"""Loads a checkpoint's tensors into MLX, one at a time, under their canonical names.

Dense tensors may be converted on the way (`dtype`); quantized modules stay packed and only their
scales and biases follow. The encoder and the decoder share every weight but `layer_scalar`.

Not here: files and their checks (`dgemma.checkpoint`), what the weights are used for.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import mlx.core as mx

from dgemma.checkpoint import Checkpoint, TensorInfo
from dgemma.config import LayerConfig, ModelConfig
from dgemma.errors import CheckpointError, ConfigError, DgemmaWarning
from mlx_dgemma.experts import Experts, ExpertWeights, choose_experts
from mlx_dgemma.layers import Mlp, Router
from mlx_dgemma.products import Dense, Matrix, Quantized, run

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_STORED_FLOATS = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}
_DECODER = "model.decoder"
_ENCODER = "model.encoder.language_model"


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer; norms are float32 [D] or [d]."""

    config: LayerConfig
    query: Matrix
    key: Matrix
    value: Matrix | None
    """None in full layers: V comes from the raw output of `key`."""
    output: Matrix
    query_norm: mx.array
    key_norm: mx.array
    input_norm: mx.array
    post_attention_norm: mx.array
    pre_mlp_norm: mx.array
    post_mlp_norm: mx.array
    pre_experts_norm: mx.array
    post_experts_norm: mx.array
    post_feedforward_norm: mx.array
    mlp: Mlp
    router: Router
    experts: Experts
    encoder_scalar: mx.array
    decoder_scalar: mx.array


@dataclass(frozen=True, eq=False)
class Weights:
    """The whole network, once."""

    config: ModelConfig
    dtype: mx.Dtype
    native: bool
    """MLX's own products, as on a GPU, instead of widened ones."""
    embedding: Matrix  # [V, D]
    final_norm: mx.array
    signal_norm: mx.array
    signal: Mlp
    layers: tuple[LayerWeights, ...]


def load_weights(source: Checkpoint, *, dtype: str | None, native: bool) -> Weights:
    """Reads and evaluates every tensor of the text model.

    `dtype` converts dense weights ("float32", "bfloat16", "float16"; None keeps the checkpoint's,
    read off its final norm). Raises `ConfigError` for another dtype and `CheckpointError` for a
    missing tensor; warns when bfloat16 weights are squeezed into float16's range.
    """
    loader = _Loader(source, dtype, native)
    config = source.config
    return Weights(
        config=config,
        dtype=loader.dtype,
        native=native,
        embedding=loader.matrix(f"{_DECODER}.embed_tokens"),
        final_norm=loader.norm(f"{_DECODER}.norm"),
        signal_norm=loader.norm(f"{_DECODER}.self_conditioning.pre_norm"),
        signal=loader.mlp(f"{_DECODER}.self_conditioning"),
        layers=tuple(loader.layer(index, layer) for index, layer in enumerate(config.layers)),
    )


class _Loader:
    """Reads tensors of one source into one dtype."""

    def __init__(self, source: Checkpoint, dtype: str | None, native: bool) -> None:
        self.source = source
        self.native = native
        stored = self._info(f"{_DECODER}.norm.weight").dtype
        if dtype is None:
            self.dtype = _STORED_FLOATS[stored]
        elif dtype in DTYPES:
            self.dtype = DTYPES[dtype]
        else:
            raise ConfigError(f"dtype {dtype!r} is unknown; use {', '.join(DTYPES)} or None")
        if self.dtype == mx.float16 and stored == "BF16":
            warnings.warn(
                "float16 was asked of a bfloat16 checkpoint: values above 65504 become infinite; "
                "use bfloat16 or float32 if the result is not finite",
                DgemmaWarning,
                stacklevel=2,
            )

    def layer(self, index: int, config: LayerConfig) -> LayerWeights:
        path = f"{_DECODER}.layers.{index}"
        attention = f"{path}.self_attn"
        return LayerWeights(
            config=config,
            query=self.matrix(f"{attention}.q_proj"),
            key=self.matrix(f"{attention}.k_proj"),
            value=self.matrix(f"{attention}.v_proj") if config.is_sliding else None,
            output=self.matrix(f"{attention}.o_proj"),
            query_norm=self.norm(f"{attention}.q_norm"),
            key_norm=self.norm(f"{attention}.k_norm"),
            input_norm=self.norm(f"{path}.input_layernorm"),
            post_attention_norm=self.norm(f"{path}.post_attention_layernorm"),
            pre_mlp_norm=self.norm(f"{path}.pre_feedforward_layernorm"),
            post_mlp_norm=self.norm(f"{path}.post_feedforward_layernorm_1"),
            pre_experts_norm=self.norm(f"{path}.pre_feedforward_layernorm_2"),
            post_experts_norm=self.norm(f"{path}.post_feedforward_layernorm_2"),
            post_feedforward_norm=self.norm(f"{path}.post_feedforward_layernorm"),
            mlp=self.mlp(f"{path}.mlp"),
            router=self.router(f"{path}.router"),
            experts=self.experts(f"{path}.experts"),
            encoder_scalar=self.dense(f"{_ENCODER}.layers.{index}.layer_scalar"),
            decoder_scalar=self.dense(f"{path}.layer_scalar"),
        )

    def mlp(self, path: str) -> Mlp:
        gate, up, down = (self.matrix(f"{path}.{name}_proj") for name in ("gate", "up", "down"))
        return Mlp(gate, up, down)

    def router(self, path: str) -> Router:
        config = self.source.config
        return Router(
            projection=self.matrix(f"{path}.proj"),
            scale=self.dense(f"{path}.scale"),
            per_expert_scale=self.dense(f"{path}.per_expert_scale", wide=True),
            top_k=config.top_k_experts,
            eps=config.rms_norm_eps,
        )

    def experts(self, path: str) -> Experts:
        weights = ExpertWeights(
            gate_up=self.stored(f"{path}.gate_up_proj", suffix=""),
            down=self.stored(f"{path}.down_proj", suffix=""),
        )
        return choose_experts(weights, native=self.native)

    def matrix(self, path: str) -> Matrix:
        return Matrix(self.stored(path), self.dtype, widen=not self.native)

    def stored(self, path: str, suffix: str = ".weight") -> Dense | Quantized:
        """The module at `path`: packed, or dense under `path + suffix`."""
        packed = self.source.quantization.of(path)
        if packed is None:
            return Dense(self.dense(path + suffix))
        biases = self.dense(f"{path}.biases") if packed.mode == "affine" else None
        return Quantized(
            weight=self.dense(f"{path}.weight"),
            scales=self.dense(f"{path}.scales"),
            biases=biases,
            group_size=packed.group_size,
            bits=packed.bits,
            mode=packed.mode,
            dtype=self.dtype,
        )

    def norm(self, path: str) -> mx.array:
        return self.dense(f"{path}.weight", wide=True)

    def dense(self, name: str, *, wide: bool = False) -> mx.array:
        """One tensor; floats become `dtype` (float32 when `wide`), integers stay."""
        stored = self._info(name).dtype
        array = mx.array(self.source.read(name))
        if stored in _STORED_FLOATS:
            if array.dtype == mx.uint16:
                array = array.view(_STORED_FLOATS[stored])
            array = array.astype(mx.float32 if wide else self.dtype)
        run(array)
        return array

    def _info(self, name: str) -> TensorInfo:
        info = self.source.tensors.get(name)
        if info is None:
            raise CheckpointError(f"the checkpoint lacks the tensor {name}; fetch it again")
        return info
