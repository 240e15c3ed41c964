"""Which kernels of a trace communicate: a table of known kernels with their sources, and names that only sound like it.

Not all communication goes through NCCL: serving engines, expert parallelism and symmetric memory bring kernels of
their own.  A kernel is looked up by its function's name, without parameters and template arguments, mangled or not;
some are known by the handles that they take, which stand among the parameters.  What no entry has and whose name sounds
like communication is a *suspect*: nobody knows whether it communicates, and neither do we.  A kernel that multiplies
matrices and communicates at once is one as well, since its time is both.

Kernels that PyTorch's Inductor makes (`triton_poi_fused_…`) are called after the operations beside them, which may be
collectives: they only compute.

Users know their own kernels: what they say of a name stands before the table (`KernelNames`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from railscope.agent.imports.torch_names import KernelName, parse_kernel_name

_LONGEST_NAME: Final = 4096
"""Letters that are looked at; names with their template arguments reach a thousand."""
_MOST_KEPT: Final = 1 << 16
"""Different names whose answer is kept; a trace has some hundreds."""


class Use(Enum):
    """What a kernel does, as far as its name tells."""

    COMMUNICATION = "communication"
    COMPUTATION = "computation"
    COPY = "copy"
    """A copy inside a GPU or a memset that a kernel makes, and no copy engine."""
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True)
class KnownKernel:
    """Kernels of one library."""

    library: str
    """As people call it."""
    pattern: str
    """A regular expression that the function's name, or where `whole` the name with its parameters, holds."""
    source: str
    """Where the library defines them."""
    op: str = ""
    """NCCL's name for what they do; empty: NCCL has no such operation, or the name does not tell."""
    use: Use = Use.COMMUNICATION
    whole: bool = False


_START: Final = r"(?:^|::|\b_*)"

KNOWN: Final = (
    KnownKernel(
        "Inductor", r"^triton_(?:poi|red|per|tem|mm|bmm|for|spl|unk)_", "torch/_inductor/codegen of PyTorch",
        use=Use.COMPUTATION,
    ),
    KnownKernel(
        "PyTorch", r"^(?:at|cub|thrust|at_cuda_detail)::", "aten/src/ATen/native/cuda of PyTorch", use=Use.COMPUTATION,
    ),
    KnownKernel("ROCm", r"^__amd_rocclr_(?:copy|fill)Buffer", "rocclr/device/blitcl.cpp of CLR", use=Use.COPY),
    KnownKernel(
        "NCCL", rf"{_START}(?:nccl|rccl|msccl)(?:x?[A-Z]|_)", "src/device/generate.py of NCCL and RCCL; "
        "src/device/msccl_kernel.h of RCCL",
    ),
    # vLLM, SGLang and aiter share their custom AllReduce's ancestor.
    KnownKernel(
        "vLLM, SGLang and aiter", rf"{_START}cross_device_reduce_scatter", "csrc/custom_all_reduce.cuh of vLLM",
        op="ReduceScatter",
    ),
    KnownKernel(
        "vLLM, SGLang and aiter", rf"{_START}cross_device_all_gather", "csrc/custom_all_reduce.cuh of vLLM",
        op="AllGather",
    ),
    KnownKernel(
        "vLLM, SGLang and aiter", rf"{_START}cross_device_reduce_", "csrc/custom_all_reduce.cuh of vLLM",
        op="AllReduce",
    ),
    KnownKernel(
        "aiter", rf"{_START}(?:reduce_scatter_cross_device_store)", "csrc/include/custom_all_reduce.cuh of aiter",
        op="ReduceScatter",
    ),
    KnownKernel(
        "aiter", rf"{_START}allgather_(?:lastdim|vec|naive)", "csrc/include/custom_all_reduce.cuh of aiter",
        op="AllGather",
    ),
    KnownKernel(
        "QuickReduce", rf"{_START}allreduce_prototype_twoshot", "csrc/quickreduce/quick_reduce.h of vLLM",
        op="AllReduce",
    ),
    KnownKernel(
        "SGLang", rf"{_START}all_reduce_(?:one|two)_shot_(?:push|pull)_kernel",
        "python/sglang/jit_kernel/csrc/distributed of SGLang", op="AllReduce",
    ),
    # TensorRT-LLM, and FlashInfer, which took its kernels over.
    KnownKernel(
        "TensorRT-LLM and FlashInfer", rf"{_START}(?:moe(?:reduction|reduce|finalize)_?)?allreduce_fusion_kernel",
        "cpp/tensorrt_llm/kernels/communicationKernels of TensorRT-LLM", op="AllReduce",
    ),
    KnownKernel(
        "TensorRT-LLM and FlashInfer",
        rf"{_START}(?:lowPrecision)?(?:[oO]ne|[tT]wo)[sS]hotAll[rR]educe(?:Fusion)?(?:Norm)?(?:Hier)?Kernel",
        "cpp/tensorrt_llm/kernels/customAllReduceKernels.cu of TensorRT-LLM", op="AllReduce",
    ),
    KnownKernel(
        "TensorRT-LLM and FlashInfer",
        rf"{_START}(?:(?:one|two)shot_allreduce_kernel|lamport_style_one_shot_all_reduce|rms[nN]ormLamport)",
        "include/flashinfer/comm of FlashInfer", op="AllReduce",
    ),
    KnownKernel(
        "TensorRT-LLM and FlashInfer", rf"{_START}moeA2A(?:Dispatch|Combine)Kernel",
        "cpp/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu of TensorRT-LLM",
    ),
    KnownKernel(
        "TensorRT-LLM and FlashInfer", rf"{_START}(?:moeAll[tT]oAll|fusedMoeComm)\w*Kernel",
        "cpp/tensorrt_llm/kernels/fusedMoeCommKernels.cu of TensorRT-LLM", op="AllToAll",
    ),
    KnownKernel(
        "TensorRT-LLM and FlashInfer", rf"{_START}moeA2A(?:Prepare|Sanitize)",
        "cpp/tensorrt_llm/kernels/communicationKernels/moeAlltoAllKernels.cu of TensorRT-LLM", use=Use.COMPUTATION,
    ),
    # Expert parallelism.
    KnownKernel(
        "DeepEP", r"(?:^|::)deep_ep::(?:\w+::)*layout::", "csrc/kernels/layout.cu of DeepEP", use=Use.COMPUTATION,
    ),
    KnownKernel("DeepEP", r"(?:^|::)deep_ep::", "csrc/kernels of DeepEP"),
    KnownKernel(
        "DeepEP", r"(?:^|::)hybrid_ep::(?:\w+::)*(?:dispatch|combine|device_sync)", "csrc/hybrid_ep of DeepEP",
    ),
    KnownKernel(
        "DeepEP", r"(?:^|::)hybrid_ep::", "csrc/hybrid_ep of DeepEP", use=Use.COMPUTATION,
    ),
    KnownKernel(
        "pplx-kernels", rf"{_START}a2a_(?:dispatch|combine)_(?:send|recv)_kernel",
        "p2p-all-to-all/a2a-kernels/src/a2a of pplx-garden",
    ),
    KnownKernel(
        "MORI", rf"{_START}Ep(?:Dispatch|Combine)\w*Kernel", "src/ops/dispatch_combine of MORI",
    ),
    # Symmetric memory.
    KnownKernel(
        "PyTorch's symmetric memory",
        rf"{_START}(?:multimem_)?(?:one|two)_shot_all_?reduce\w*kernel",
        "torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu of PyTorch", op="AllReduce",
    ),
    KnownKernel(
        "PyTorch's symmetric memory", rf"{_START}multimem_all_?reduce",
        "torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu of PyTorch", op="AllReduce",
    ),
    KnownKernel(
        "PyTorch's symmetric memory", rf"{_START}multimem_all_?gather",
        "torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu of PyTorch", op="AllGather",
    ),
    KnownKernel(
        "PyTorch's symmetric memory", rf"{_START}multimem_reduce_?scatter",
        "torch/csrc/distributed/c10d/symm_mem of PyTorch", op="ReduceScatter",
    ),
    KnownKernel(
        "PyTorch's symmetric memory", rf"{_START}multimem_\w+_kernel",
        "torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu of PyTorch",
    ),
    KnownKernel(
        "PyTorch's symmetric memory", rf"{_START}hybridCubeMeshAllReduceKernel",
        "torch/csrc/distributed/c10d/intra_node_comm.cu of PyTorch", op="AllReduce",
    ),
    KnownKernel(
        "PyTorch's symmetric memory",
        r"(?:^|::)c10d::(?:symmetric_memory|nvshmem_extension|intra_node_comm)::",
        "torch/csrc/distributed/c10d of PyTorch",
    ),
    KnownKernel(
        "NVSHMEM", rf"{_START}(?:nvshmem|rocshmem)(?:[a-z]*_|[A-Z])", "src/device of NVSHMEM; src of rocSHMEM",
    ),
    KnownKernel(
        "NVSHMEM", rf"{_START}(?:barrier|sync|alltoall|fcollect|broadcast|reducescatter|rdxn|signal_wait|quiet|proxy)"
        r"(?:all|\d+|_\w+)?_on_stream_kernel", "src/host/coll and src/device/launch of NVSHMEM",
    ),
    KnownKernel("MSCCL++", r"(?:^|::)mscclpp::", "src of MSCCL++"),
    KnownKernel(
        "MSCCL++", r"\bmscclpp::(?:DeviceHandle|\w*Channel|\w*Semaphore)", "apps/nccl/src of MSCCL++", whole=True,
    ),
    KnownKernel(
        "NCCL's device API", r"\bnccl(?:DevComm|Window_t|GinSyncHandle)\b", "src/include/nccl_device of NCCL",
        whole=True,
    ),
    KnownKernel(
        "Transformer Engine's userbuffers", rf"{_START}k?userbuffers_\w*_rs(?:_|$)",
        "transformer_engine/common/comm_gemm_overlap/userbuffers of Transformer Engine", op="ReduceScatter",
    ),
    KnownKernel(
        "Transformer Engine's userbuffers", rf"{_START}k?userbuffers_\w*_ag(?:_|$)",
        "transformer_engine/common/comm_gemm_overlap/userbuffers of Transformer Engine", op="AllGather",
    ),
    KnownKernel(
        "Transformer Engine's userbuffers", rf"{_START}k?userbuffers_",
        "transformer_engine/common/comm_gemm_overlap/userbuffers of Transformer Engine",
    ),
    KnownKernel("TurboMind", r"(?:^|::)turbomind::comm::", "src/turbomind/comm of LMDeploy"),
    KnownKernel("oneCCL", rf"{_START}(?:oneccl|ccl)(?:_|::)", "src/coll of oneCCL"),
)  # fmt: skip
"""What is known, the more special first: the first entry that a name matches counts."""

_COMPILED: Final = tuple((entry, re.compile(entry.pattern)) for entry in KNOWN)
_COLLECTIVE: Final = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|(?:^|[^a-z0-9])a2a(?:[^a-z]|$)|send_?recv|cross_device"
    r"|multimem|nvshmem|rocshmem|nccl|rccl|symm(?:etric)?_?mem|lamport|(?:one|two)_?shot_?(?:push|pull|reduce)"
    r"|(?:^|[^a-z0-9])p2p(?:[^a-z]|$)"
)
"""In small letters: what sounds like communication."""
_MATRICES: Final = re.compile(r"gemm|matmul|_mm_|mega_?moe|ffn")
"""In small letters: what multiplies matrices, and may communicate in the same kernel."""
_NOTHING_SAID: Final = KernelName("", "", "")
_MANGLED: Final = re.compile(r"^_ZN?[KVrRO]*(?:St)?(?=\d)")
_LENGTH: Final = re.compile(r"\d{1,4}")
_ANONYMOUS: Final = "(anonymous namespace)"
_BEFORE: Final = re.compile(r"^(?:void|static|__global__)\s+")


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What is known of one kernel's name."""

    use: Use
    library: str = ""
    """That it is of; empty: no entry has it."""
    said: KernelName = _NOTHING_SAID
    """Operation, algorithm and protocol, as far as the name tells."""

    @property
    def of_nccl(self) -> bool:
        """Whether NCCL or RCCL launched it, on the stream of one communicator."""
        return self.library == "NCCL"


class KernelNames:
    """Answers what kernels are by their names, with what a user says of some of them."""

    def __init__(self, communication: Sequence[str] = (), computation: Sequence[str] = ()) -> None:
        """Both are parts of kernels' names, as the trace spells them."""
        self._said = [(part, Use.COMMUNICATION) for part in communication]
        self._said += [(part, Use.COMPUTATION) for part in computation]
        self._known: dict[str, KernelUse] = {}

    def find_use(self, name: str) -> KernelUse:
        """What the kernel of this name is."""
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            found = self._known[name] = self._find_use(name)
        return found

    def _find_use(self, name: str) -> KernelUse:
        found = classify_kernel(name)
        said = next((use for part, use in self._said if part in name), None)
        if said is None or said is found.use:
            return found
        return KernelUse(said, "as the user says", parse_kernel_name(function_path(name[:_LONGEST_NAME])))


def classify_kernel(name: str) -> KernelUse:
    """What the table knows of a kernel's name."""
    name = name[:_LONGEST_NAME]
    path = function_path(name)
    for entry, pattern in _COMPILED:
        if not pattern.search(name if entry.whole else path):
            continue
        if entry.use is not Use.COMMUNICATION:
            return KernelUse(entry.use, entry.library)
        said = parse_kernel_name(path)
        if entry.library != "NCCL":
            if _MATRICES.search(path.lower()):
                return KernelUse(Use.SUSPECT)
            said = KernelName(entry.op, "", "")
        return KernelUse(Use.COMMUNICATION, entry.library, said)
    return KernelUse(Use.SUSPECT if _COLLECTIVE.search(path.lower()) else Use.COMPUTATION)


def function_path(name: str) -> str:
    """The function of a kernel's name without return type, template arguments and parameters, such as `vllm::f`.

    Of a mangled name (`_ZN4vllm1fI6__halfEEvPT_`), the nested names that it begins with.
    """
    mangled = _MANGLED.match(name)
    if mangled is not None:
        return _mangled_path(name, mangled.end())
    name = _BEFORE.sub("", name.strip())
    kept: list[str] = []
    depth = at = 0
    while at < len(name):
        letter = name[at]
        if letter == "<":
            depth += 1
        elif letter == ">" and depth:
            depth -= 1
        elif not depth:
            if letter == "(":
                if not name.startswith(_ANONYMOUS, at):
                    break
                at += len(_ANONYMOUS) + 2  # with the two colons
                continue
            kept.append(letter)
        at += 1
    return "".join(kept).strip().removesuffix(".kd")


def _mangled_path(name: str, at: int) -> str:
    parts = []
    while (length := _LENGTH.match(name, at)) is not None:
        at = length.end() + int(length[0])
        parts.append(name[length.end() : at])
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N_"))
