"""Facts about GPUs: a table, each entry with its source.

Peaks are *dense* (no sparsity) and as the vendor states them; `roofline` knows what part of them a model reaches. All
rates are per GPU. Memory is in GiB, everything else in powers of ten, as vendors count.

Sources, by letter in the table below:

- **V** the vendor's data sheet of that board (for the RTX 4090 the Ada white paper's FP32-accumulate figures).
- **S** ``memory.total`` of nvidia-smi on such a board, in MiB.
- **C** the system files of NVIDIA aiconfigurator 0.12 (Apache-2.0), which agree with V where both speak.
- **B** baseten.co, "NVIDIA A10 vs A10G": 70 dense FP16 TFLOP/s for the A10G against the A10's 125.
- **P** on-demand price of one GPU for an hour, the middle of what was offered in 2026-05 (mercatus-ai.com and
  gpu.blog; the spread between providers is 2 to 4 times): a parameter of every plan, not a fact. For the RTX boards and
  the L4, which they do not list, E.
- **I** idle, estimated: 15 % of the TDP. A loaded model keeps a GPU 26 to 66 W above bare idle (arXiv 2605.23918, for
  H100, A100, L40S), and a bare H200 was measured at 80 W (api.serialalice.pt, 2026-06): together 106 to 146 W, which
  15 % of 700 W meets at its lower end.
- **E** estimated, for want of a source.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from cluster.errors import UsageError

IDLE_SHARE = 0.15
"""Part of the TDP that an idle GPU with a loaded model draws (source I above)."""


class Dtype(StrEnum):
    """A number format, for storage or arithmetic."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"

    @property
    def size_bytes(self) -> float:
        """Bytes of one number, without scales."""
        return {Dtype.FP32: 4.0, Dtype.BF16: 2.0, Dtype.FP8: 1.0, Dtype.INT8: 1.0, Dtype.FP4: 0.5}[self]


def kv_dtype_named(word: object) -> Dtype | None:
    """The format that vLLM's ``--kv-cache-dtype`` names; None: as the activations (``auto``), or a format unknown here.

    Scales are left out, as everywhere: they are one number a head or a tensor.
    """
    if not isinstance(word, str):
        return None
    if word in {"bfloat16", "float16"}:
        return Dtype.BF16
    found = ((("fp8",), Dtype.FP8), (("int8",), Dtype.INT8), (("nvfp4", "int4"), Dtype.FP4))
    return next((dtype for beginnings, dtype in found if word.startswith(beginnings)), None)


def is_kv_dtype_priced(word: str) -> bool:
    """Whether costs and sizes follow a word of vLLM's ``--kv-cache-dtype``; False for a format that vLLM 0.32 has and
    the model of costs does not: nothing has its effect.

    Raises:
        UsageError: vLLM does not start with it.
    """
    if word in {"", "auto"} or kv_dtype_named(word) is not None:
        return True
    if word.startswith(("turboquant_", "ultraquant_")):
        return False
    raise UsageError(
        f"--kv-cache-dtype {word}: vLLM has auto, bfloat16, float16, fp8, fp8_e5m2, int8_per_token_head, ..."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One type of GPU (or one CPU core: `CPU-core`). It has many attributes, as a vendor's data sheet has."""

    name: str
    memory_gib: float
    """Memory as the driver reports it, not as advertised."""
    bandwidth_gb_s: float
    """Peak memory bandwidth."""
    bf16_tflops: float
    """Peak dense matrix rate in bf16 or fp16 with fp32 accumulation."""
    fp8_tflops: float = 0.0
    """The same in fp8; 0 = no fp8 units: fp8 weights are computed in bf16."""
    fp4_tflops: float = 0.0
    link_gb_s: float
    """Bandwidth to the other GPUs of the node, one way: NVLink, Infinity Fabric or PCIe."""
    nic_gb_s: float
    """This GPU's share of the node's network, one way."""
    node_gpus: int = 8
    """GPUs that `link_gb_s` joins."""
    tdp_w: float
    idle_w: float
    usd_per_hour: float
    aka: tuple[str, ...] = ()
    """Other spellings: nvidia-smi's, vLLM's, those of trace and profile files."""

    def tflops(self, dtype: Dtype) -> float:
        """Peak dense matrix rate in `dtype`, in TFLOP/s; for a format without units, that of the next wider format.
        int8 counts as fp8.
        """
        if dtype is Dtype.FP32:
            return self.bf16_tflops / 2  # tf32 units run at half the rate on every GPU listed; CPUs likewise
        if dtype is Dtype.FP4 and self.fp4_tflops:
            return self.fp4_tflops
        return self.fp8_tflops or self.bf16_tflops if dtype is not Dtype.BF16 else self.bf16_tflops


def _gpu(
    name: str,
    memory_mib: int,
    bandwidth_gb_s: float,
    tflops: tuple[float, float, float],
    network: tuple[float, float, int],
    tdp_w: float,
    usd_per_hour: float,
    *aka: str,
) -> Gpu:
    bf16, fp8, fp4 = tflops
    link, nic, node = network
    return Gpu(
        name=name,
        memory_gib=memory_mib / 1024,
        bandwidth_gb_s=bandwidth_gb_s,
        bf16_tflops=bf16,
        fp8_tflops=fp8,
        fp4_tflops=fp4,
        link_gb_s=link,
        nic_gb_s=nic,
        node_gpus=node,
        tdp_w=tdp_w,
        idle_w=round(IDLE_SHARE * tdp_w, 1),
        usd_per_hour=usd_per_hour,
        aka=aka,
    )


# name, memory MiB (S), GB/s (V), dense TFLOP/s in bf16 · fp8 · fp4 (V; 0 = none), one-way GB/s to peers (V) · of the
# NIC · number of peers, TDP W (V), $/h (P), other names. NIC: 200 Gbit/s beside an A100, 400 beside Hopper and newer
# (C), else as remarked.
_TABLE = (
    _gpu("A100-40G-SXM", 40960, 1555, (312, 0, 0), (300, 25, 8), 400, 1.10, "a100-sxm4-40gb", "a100-40gb"),
    _gpu(
        "A100-80G-SXM",
        81920,
        2039,
        (312, 0, 0),
        (300, 25, 8),
        400,
        1.50,
        "a100",
        "a100_sxm",
        "a100-80gb",
        "a100-sxm4-80gb",
    ),
    _gpu(
        "H100-SXM",
        81559,
        3350,
        (989, 1978, 0),
        (450, 50, 8),
        700,
        2.95,
        "h100",
        "h100_sxm",
        "h100-80gb",
        "h100 80gb hbm3",
    ),
    # NVLink bridges join two PCIe boards; without one it is PCIe 5 x16, counted here. Peaks: 756 and 1,513 (V).
    _gpu("H100-PCIe", 81559, 2000, (756, 1513, 0), (64, 50, 8), 350, 2.39, "h100_pcie", "h100 pcie"),
    _gpu("H200", 143771, 4800, (989, 1978, 0), (450, 50, 8), 700, 3.80, "h200-sxm", "h200_sxm"),
    _gpu("B200", 183359, 7700, (2250, 4500, 9000), (900, 50, 8), 1000, 5.98, "b200-sxm", "b200_sxm"),
    # NIC: 25 to 200 Gbit/s are sold, 100 taken (E).
    _gpu("L40S", 46068, 864, (362, 733, 0), (32, 12.5, 8), 350, 1.20),
    # FP32-accumulate figures, half of the headline FP16-accumulate ones. NIC: 10 Gbit/s Ethernet (E).
    _gpu("RTX-4090", 24564, 1008, (165.2, 330.3, 0), (32, 1.25, 8), 450, 0.50, "geforce rtx 4090", "rtx4090"),
    # 467.8 and 935.6 at the 2,430 MHz that the Server Edition runs at (C), below the 503.8 of the workstation's sheet.
    _gpu(
        "RTX-PRO-6000",
        97887,
        1792,
        (467.8, 935.6, 1871.2),
        (64, 50, 8),
        600,
        1.80,
        "rtxpro6000",
        "rtx pro 6000 blackwell server edition",
    ),
    # 70 instead of the A10's 125 (B). NIC: 100 Gbit/s for the 8 GPUs of AWS g5.48xlarge (V). Price: AWS g5.xlarge.
    _gpu("A10G", 23028, 600, (70, 0, 0), (32, 1.6, 8), 300, 1.01, "a10g"),
    # NIC: 25 to 100 Gbit/s are sold, 50 taken (E).
    _gpu("L4", 23034, 300, (121, 242, 0), (32, 6.25, 8), 72, 0.44),
    _gpu("MI300X", 196592, 5300, (1307, 2615, 0), (448, 50, 8), 750, 3.00, "instinct mi300x"),
    # One core of a server CPU with AVX-512 (2.5 GHz × 32 multiply-adds) and its share of everything else. All E: for
    # the model that ships, where only the order of magnitude counts.
    _gpu("CPU-core", 4096, 12, (0.16, 0, 0), (3, 1.25, 64), 5, 0.04, "cpu"),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _TABLE})
"""Every GPU of the table by its name."""


def _plain(name: str) -> str:
    """A name without vendor, case and punctuation: "NVIDIA H100 80GB HBM3" and "h100-80gb-hbm3" become one."""
    return re.sub(r"[^a-z0-9]|nvidia|amd|geforce", "", name.lower())


_BY_PLAIN = {_plain(word): gpu for gpu in _TABLE for word in (gpu.name, *gpu.aka)}


def find_gpu(name: str) -> Gpu | None:
    """The GPU of this name in any of its spellings; None if the table has no such GPU."""
    return _BY_PLAIN.get(_plain(name))


def gpu_named(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        UsageError: the table has no such GPU; the message names the nearest ones.
    """
    found = find_gpu(name)
    if found is None:
        near = difflib.get_close_matches(_plain(name), _BY_PLAIN, n=3, cutoff=0.4)
        known = dict.fromkeys(_BY_PLAIN[each].name for each in near) or GPUS
        raise UsageError(f"Nothing is known about the GPU {name!r}. Known and near: {', '.join(known)}.")
    return found
