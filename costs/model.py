"""The sizes of a model: parameters, bytes of weights, bytes of KV cache, arithmetic per token.

A `ModelShape` holds the numbers that decide a step's cost, and nothing else: no names of layers. `config` reads one
from a Hugging Face ``config.json``. Parameters are counted exactly for the families that `config` knows (the tests
compare with the published checkpoints), so that bytes per GPU can be trusted.

Not modelled: encoders of images and sound (only the text model is counted), draft and multi-token-prediction heads,
adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

from costs.hardware import Dtype
from costs.shape import CostShape, expert_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek): one vector of `kv_rank` + `rope` numbers per token and layer.

    `nope`, `rope` and `value` are a head's sizes: of queries and keys without and with rotary positions, and of values.
    """

    kv_rank: int
    q_rank: int
    """0: queries are projected directly."""
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in `layers` of the layers."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    """Width of all shared experts together, which every token visits."""
    layers: int

    @property
    def miss(self) -> float:
        """Probability that one token does not visit a given expert: 1 - k/E."""
        return 1 - self.per_token / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of one decoder-only transformer. It has many attributes: each changes a cost."""

    name: str = ""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense layer's MLP."""
    vocab: int
    gated: bool = True
    """Whether the MLP has three matrices (SwiGLU and kin) or two."""
    tied: bool = False
    """Whether the output layer shares the embedding's weights."""
    latent: Latent | None = None
    experts: Experts | None = None
    window_tokens: int = 0
    """Sliding window; 0 = none."""
    window_layers: int = 0
    """Layers that look back no further than the window."""
    small_params: int = 0
    """Parameters of norms, biases, learned positions: counted, never sharded."""
    linear_dtype: Dtype = Dtype.BF16
    """The format that the matrix products of attention and dense MLPs are computed in."""
    linear_bytes: float = 2.0
    """Bytes per weight of those matrices, scales included."""
    expert_dtype: Dtype = Dtype.BF16
    expert_bytes: float = 2.0
    rest_bytes: float = 2.0
    """Bytes per weight of embeddings, output layer and small parameters, which are not quantised; also of
    activations."""

    def splits(self, tp: int) -> bool:
        """Whether vLLM can split the layers over so many tensor-parallel ranks: it does not start if they do not divide
        the heads and the MLPs' widths. KV heads are split evenly, or, where there are fewer, copied evenly.
        """
        widths = [self.intermediate] if self.dense_layers else []
        if self.experts:
            widths += [self.experts.intermediate, self.experts.shared_intermediate]
        return self.undivided_heads(tp) is None and not any(size % tp for size in widths)

    def undivided_heads(self, tp: int) -> str | None:
        """Why attention's heads cannot be split over so many tensor-parallel ranks; None: they can."""
        kv = self.latent is not None or self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        if kv and self.heads % tp == 0:
            return None
        counted = f"{self.heads} heads" if self.heads % tp else f"{self.kv_heads} KV heads"
        return f"{self.name} has {counted}, which {tp} ranks of tensor parallelism cannot share: vLLM does not start"

    # -- parameters --

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention."""
        if self.latent is None:
            return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self._latent_shared + self._latent_by_head

    @property
    def _latent_shared(self) -> int:
        """The down-projections of latent attention: every tensor-parallel rank holds all of them."""
        latent = self.latent
        assert latent is not None
        return self.hidden * (latent.q_rank + latent.kv_rank + latent.rope)

    @property
    def _latent_by_head(self) -> int:
        latent = self.latent
        assert latent is not None
        queries = (latent.q_rank or self.hidden) * (latent.nope + latent.rope)
        return self.heads * (queries + latent.kv_rank * (latent.nope + latent.value) + latent.value * self.hidden)

    def _mlp(self, width: int) -> int:
        return self.hidden * width * (3 if self.gated else 2)

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def linear_params(self) -> int:
        """Parameters that every token is multiplied with: attention, dense MLPs, shared experts and routers of all
        layers.
        """
        params = self.layers * self.attention_params + self.dense_layers * self._mlp(self.intermediate)
        if self.experts:
            every = self._mlp(self.experts.shared_intermediate) + self.hidden * self.experts.count
            params += self.experts.layers * every
        return params

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.experts.layers * self.experts.count * self._mlp(self.experts.intermediate) if self.experts else 0

    @property
    def active_expert_params(self) -> int:
        """Parameters of the routed experts that one token visits."""
        return self.expert_params * self.experts.per_token // self.experts.count if self.experts else 0

    @property
    def head_params(self) -> int:
        """Parameters of the output layer (tied or not): as many as one embedding."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        embeddings = self.head_params * (1 if self.tied else 2)
        return self.linear_params + self.expert_params + embeddings + self.small_params

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but those of the experts that it does not visit."""
        return self.params - self.expert_params + self.active_expert_params

    # -- bytes --

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model's weights."""
        rest = self.params - self.linear_params - self.expert_params
        return round(
            self.linear_params * self.linear_bytes + self.expert_params * self.expert_bytes + rest * self.rest_bytes
        )

    def weight_bytes_per_gpu(self, shape: CostShape) -> int:
        """Bytes of weights on the fullest GPU of an instance: a full pipeline stage, with embedding and output table
        (one of the two if they are tied, or in a pipeline).

        Heads, MLPs and tables are split `tp` ways; K and V are copied where there are fewer KV heads than ranks;
        experts are split over all ranks of the stage.
        """
        stage = -(-self.layers // shape.pp) / self.layers
        linear = stage * self.linear_params_per_rank(shape.tp) * self.linear_bytes
        experts = stage * self.expert_params * self.expert_bytes / expert_ranks(shape)
        tables = 1 if self.tied or shape.pp > 1 else 2
        rest = (tables * self.head_params / shape.tp + self.small_params) * self.rest_bytes
        return round(linear + experts + rest)

    def linear_params_per_rank(self, tp: int) -> float:
        """The part of `linear_params` that one of `tp` ranks holds and computes with, copies included."""
        whole = self.layers * self._latent_shared if self.latent else 0
        copied = 0.0
        if self.latent is None and tp > self.kv_heads:
            kv = self.layers * self.hidden * self.head_dim * 2 * self.kv_heads
            copied = kv / self.kv_heads - kv / tp
        return whole + (self.linear_params - whole) / tp + copied

    def kv_bytes_per_token(self, kv_dtype: Dtype | None = None) -> int:
        """Bytes of KV cache of one token over all layers, held once. `kv_dtype` None = as the activations."""
        size = self.rest_bytes if kv_dtype is None else kv_dtype.size_bytes
        if self.latent:
            return round(self.layers * (self.latent.kv_rank + self.latent.rope) * size)
        return round(self.layers * 2 * self.kv_heads * self.head_dim * size)

    def kv_bytes_per_token_per_gpu(self, shape: CostShape, kv_dtype: Dtype | None = None) -> int:
        """Bytes of KV cache of one token on one GPU. Every rank holds all of latent attention's KV; no KV head is split
        over ranks.
        """
        whole = self.kv_bytes_per_token(kv_dtype) * -(-self.layers // shape.pp) / self.layers
        if self.latent:
            return round(whole)
        return round(whole * max(1, -(-self.kv_heads // shape.tp)) / self.kv_heads)

    # -- matching of profiles --

    @property
    def fingerprint(self) -> str:
        """Equal for models whose steps cost the same: a fine-tune has its base model's fingerprint, whatever its name.

        The vocabulary counts in steps of 8,192: a few added tokens do not matter, a much larger output layer does.
        """
        mlp = f"{self.intermediate}{'' if self.gated else 'u'}"
        if self.experts:
            mlp += f"+{self.experts.layers}x{self.experts.count}/{self.experts.per_token}x{self.experts.intermediate}"
        heads = f"{self.heads}/mla{self.latent.kv_rank}" if self.latent else f"{self.heads}/{self.kv_heads}"
        kinds = f"{self.linear_dtype}" + (f"+{self.expert_dtype}" if self.expert_dtype != self.linear_dtype else "")
        window = f" w{self.window_tokens}x{self.window_layers}" if self.window_tokens else ""
        return f"{self.layers}x{self.hidden} {heads}x{self.head_dim} {mlp} v{round(self.vocab / 8192)} {kinds}{window}"
