"""Which kernels communicate, by names as traces have them."""

from __future__ import annotations

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.imports.communication_kernels import (
    KNOWN,
    KernelNames,
    Use,
    classify_kernel,
    function_path,
)
from railscope.probes.nccl.abi import Op

COMMUNICATION: Final = {
    # NCCL and RCCL, of several versions.
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "AllReduce",
    "ncclKernel_AllGather_TREE_LL128_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "AllGather",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)": "SendRecv",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "",
    "ncclDevKernelDebug_Generic(ncclDevComm*, channelMasks, ncclWork*)": "",
    "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)": "AllReduce",
    "ncclSymkDevKernel_ReduceScatter_RailA2A_LsaLD_sum_f32": "ReduceScatter",
    "ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)": "AllGather",
    "ncclDevKernel_AllGatherV_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "AllGatherV",
    "ncclKernelAllToAllv": "AllToAll",
    "mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": "",
    "_Z23ncclDevKernel_Generic_124ncclDevKernelArgsStorageILm4096EE.kd": "",
    # Serving.
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, int)": "AllReduce",
    "void sglang::cross_device_reduce_1stage<__half, 8>(sglang::RankData*)": "AllReduce",
    "void aiter::cross_device_reduce_2stage_write_mode<std::bfloat16, 8>(int)": "AllReduce",
    "_ZN4vllm26cross_device_reduce_1stageI6__halfLi2EEEvPNS_8RankDataE": "AllReduce",
    "void aiter::reduce_scatter_cross_device_store<float, 8>(int)": "ReduceScatter",
    "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<__half, CodecQ4<__half, 4>, true>, __half>(int)":
        "AllReduce",
    "void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16, 4u, true>(int)": "AllReduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1, __nv_bfloat16, 8>(int)":
        "AllReduce",
    "moefinalize_allreduce_fusion_kernel_oneshot_lamport": "AllReduce",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8, true>(AllReduceParams)": "AllReduce",
    "void tensorrt_llm::kernels::lowPrecisionTwoShotAllReduceKernel<8>(int)": "AllReduce",
    "lamport_style_one_shot_all_reduce_norm_kernel<4, __half, 8, false>": "AllReduce",
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8, false>(int)": "",
    # Expert parallelism.
    "void deep_ep::internode::dispatch<false, 8, true>(int4*, float*)": "",
    "void deep_ep::intranode::cached_notify_combine<8>(void**, int*)": "",
    "void deep_ep::internode_ll::combine<true, 7168, 9>(void*)": "",
    "void hybrid_ep::dispatch_kernel<int>(hybrid_ep::dispatch_kernel_param_t<int>)": "",
    "hybrid_ep::device_sync_kernel<8>": "",
    "void a2a_dispatch_send_kernel<true, 16>(unsigned long)": "",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs<hip_bfloat16>)": "",
    # Symmetric memory.
    "void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "AllReduce",
    "void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<float, 16>(float*)": "AllReduce",
    "void c10d::symmetric_memory::two_shot_all_reduce_kernel_inplace<float>(float*)": "AllReduce",
    "one_shot_all_reduce_kernel_0d1d2de3de": "AllReduce",
    "_multimem_all_gather_kernel": "AllGather",
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**)": "",
    "void c10d::nvshmem_extension::allToAllV<8>(int)": "",
    "void c10d::intra_node_comm::hybridCubeMeshAllReduceKernel<true>(at::BFloat16*)": "AllReduce",
    "void barrier_on_stream_kernel_threadgroup<(threadgroup_t)2>(int, int)": "",
    "nvshmemi_proxy_quiet_entrypoint": "",
    "rocshmem_alltoallmem_kernel": "",
    "void mscclpp::executionKernel<__half, mscclpp::LL16Packet>(int, __half*)": "",
    "void allreduce7<__half>(__half*, mscclpp::DeviceHandle<mscclpp::SmChannel>*, int)": "",
    "void my_kernel<float>(ncclDevComm, ncclWindow_t, float*)": "",
    "void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int)": "AllGather",
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_fp8<8, __nv_fp8_e4m3>(int)": "ReduceScatter",
    "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)": "",
}  # fmt: skip
"""Names, and NCCL's name for what they do; empty: not told."""

COMPUTATION: Final = (
    "gemm_made_up",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>(int)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, at::detail::Array<char*, 1>>(int)",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_64x3_tn_align8>(int)",
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>>(flash::Flash_fwd_params)",
    # Inductor calls kernels after what stands beside them; they communicate with nobody.
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
    "triton_red_fused__to_copy_add_reduce_scatter_tensor_0d1d2de",
    # What goes to whom is computed before anything is sent.
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(int)",
    "void deep_ep::legacy::layout::get_dispatch_layout<256>(int)",
    "moeA2APrepareDispatchKernel",
    "void hybrid_ep::scan<256>(int)",
    "void moe::dev::activation::activationDeepSeekKernel<int>(int)",
)

SUSPECTS: Final = (
    "void mystery::fast_all_reduce<8>(float*)",
    "allreduce_one_shot_push_intra_node_kernel_v2",
    "xccl_ring_exchange_nccl_like",
    "my_all_to_all_kernel",
    "ring_send_recv_kernel",
    # Both at once: its time is neither's alone.
    "gemm_one_shot_all_reduce_kernel",
)


@pytest.mark.parametrize(("name", "op"), COMMUNICATION.items())
def test_kernels_that_communicate_are_known_by_their_names(name: str, op: str) -> None:
    found = classify_kernel(name)
    assert found.use is Use.COMMUNICATION
    assert found.said.op == op
    assert op == "" or op in Op.__members__
    assert found.library


@pytest.mark.parametrize("name", COMPUTATION)
def test_kernels_that_compute_are_never_taken_for_communication(name: str) -> None:
    assert classify_kernel(name).use is Use.COMPUTATION


@pytest.mark.parametrize("name", SUSPECTS)
def test_what_only_sounds_like_communication_is_left_to_the_user(name: str) -> None:
    assert classify_kernel(name).use is Use.SUSPECT


@pytest.mark.parametrize("name", ["__amd_rocclr_copyBuffer.kd", "__amd_rocclr_fillBufferAligned.kd"])
def test_copies_that_a_kernel_makes_are_no_computation(name: str) -> None:
    assert classify_kernel(name).use is Use.COPY


def test_only_kernels_of_nccl_belong_to_the_communicator_of_their_stream() -> None:
    assert classify_kernel("ncclDevKernel_Generic_4(x)").of_nccl
    assert not classify_kernel("void vllm::cross_device_reduce_2stage<float, 8>(int)").of_nccl


def test_every_entry_names_its_source_and_an_operation_of_nccl() -> None:
    for entry in KNOWN:
        assert re.search(r"/| of ", entry.source), entry
        assert entry.op in ("", *Op.__members__)
        assert entry.use is not Use.SUSPECT


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("void vllm::f<__half, 8>(vllm::RankData*)", "vllm::f"),
        ("void f<(g)2>(int)", "f"),
        ("void (anonymous namespace)::f<4u>((anonymous namespace)::A)", "f"),
        ("_ZN4vllm1fI6__halfLi2EEEvPT_", "vllm::f"),
        ("_ZN12_GLOBAL__N_11fEv", "f"),
        ("_Z1fPf", "f"),
        ("f.kd", "f"),
        ("", ""),
    ],
)
def test_functions_of_kernels(name: str, path: str) -> None:
    assert function_path(name) == path


def test_what_users_say_comes_before_the_table() -> None:
    names = KernelNames(communication=["gemm_made_up"], computation=["cross_device"])
    assert names.find_use("gemm_made_up").use is Use.COMMUNICATION
    assert names.find_use("void vllm::cross_device_reduce_1stage<float>(int)").use is Use.COMPUTATION
    assert names.find_use("other").use is Use.COMPUTATION


@given(st.text(alphabet="_ZN4<>(): anonymousfl*0123", max_size=60))
def test_no_name_is_too_odd(name: str) -> None:
    assert classify_kernel(name).use in Use
    assert classify_kernel(name * 500).use in Use
