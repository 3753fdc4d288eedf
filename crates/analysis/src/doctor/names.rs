//! The meaning of the names in a trace: which kernels copy, convert layouts, multiply f32 without tensor cores or work
//! element by element, and which calls wait or allocate.
//!
//! A name goes in, and its meaning comes out. Names are those of CUDA 10 to 13, ROCm 5 and 6, cuDNN, cuBLAS, CUTLASS and
//! PyTorch 1.8 to 2.9. An unknown name has no meaning.

use crate::hta::KernelKind;

/// The kind of a device's work, as far as causes of lost time need it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Class {
    /// A collective, or a message between two ranks.
    Communication,
    /// A copy to the device. `is_pageable`: from memory that the device cannot read by itself.
    CopyIn { is_pageable: bool },
    /// A copy to the host.
    CopyOut,
    /// A copy within the device or between devices, or memory that is set.
    Move,
    /// A conversion between NCHW and NHWC.
    Layout,
    /// A product or convolution of f32 that uses no tensor cores.
    SinglePrecision,
    /// One operation on each element.
    Elementwise,
    /// Any other computation.
    #[default]
    Other,
}

/// Parts of the names of products and convolutions of f32 without tensor cores.
const SINGLE: &str =
    "sgemm scudnn _simt_ dgrad_engine<float wgrad_alg0_engine<float conv2d_c1_k1_nhwc_kernel<float";
/// Parts of the names of kernels that use tensor cores, although one of [`SINGLE`] may be in them.
const TENSOR_CORES: [&str; 8] =
    ["tensorop", "tf32", "s1688", "s16816", "h884", "h1688", "h16816", "s884"];

impl Class {
    pub(crate) fn of(name: &str) -> Self {
        match KernelKind::of_kernel(name) {
            KernelKind::Communication => return Self::Communication,
            KernelKind::Memory | KernelKind::Other => {
                return match name {
                    _ if name.contains("HtoD") => {
                        Self::CopyIn { is_pageable: name.contains("Pageable") }
                    }
                    _ if name.contains("DtoH") => Self::CopyOut,
                    _ => Self::Move,
                };
            }
            KernelKind::Computation => {}
        }
        let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        if has(&["nchwToNhwc", "nhwcToNchw", "nchw2nhwc", "nhwc2nchw", "batched_transpose"]) {
            Self::Layout
        } else if (SINGLE.split(' ').any(|part| name.contains(part))
            || name.contains("gemmSN") && name.contains("<float"))
            && !has(&TENSOR_CORES)
        {
            Self::SinglePrecision
        } else if name.contains("elementwise_kernel") {
            Self::Elementwise
        } else {
            Self::Other
        }
    }
}

/// Whether a call of CUDA or HIP returns only when work of the device has ended: `cudaStreamSynchronize`.
pub(super) fn waits(call: &str) -> bool {
    let call = call.strip_prefix("cuda").or(call.strip_prefix("cu")).or(call.strip_prefix("hip"));
    let what = call.and_then(|call| call.strip_suffix("Synchronize"));
    what.is_some_and(|what| ["Stream", "Device", "Event", "Ctx"].contains(&what))
}

/// Whether a call of CUDA or HIP takes memory from the driver or gives it back.
pub(super) fn allocates(call: &str) -> bool {
    const CALLS: &str = "Malloc Free HostAlloc MallocHost FreeHost HostMalloc HostFree";
    let call = call.strip_prefix("cuda").or(call.strip_prefix("hip"));
    call.is_some_and(|call| CALLS.split(' ').any(|of| of == call))
}

/// Operators of PyTorch that work element by element, without `aten::`. Those of the backward pass are named after them.
const ELEMENTWISE: &str = "abs add clamp clamp_min cos div elu erf exp gelu hardsigmoid hardswish hardtanh leaky_relu log mish \
    mul neg pow reciprocal relu rsqrt rsub sigmoid silu sin softplus sqrt square sub tanh";
/// The name under which autograd evaluates a function: `autograd::engine::evaluate_function: MulBackward0`.
const EVALUATED: &str = "autograd::engine::evaluate_function: ";

/// Whether an operator on a processor works element by element: `aten::mul_`, or autograd's `MulBackward0`.
pub(super) fn is_elementwise(operator: &str) -> bool {
    if let Some(name) = operator.strip_prefix("aten::") {
        let name = name.strip_suffix('_').unwrap_or(name);
        return ELEMENTWISE.split(' ').any(|of| of == name);
    }
    let function = operator.strip_prefix(EVALUATED).unwrap_or_default();
    let Some((name, _)) = function.split_once("Backward") else { return false };
    // `ClampMin` is `clamp_min`.
    let name = name.to_ascii_lowercase();
    ELEMENTWISE.split(' ').any(|of| of.split('_').flat_map(str::chars).eq(name.chars()))
}

/// The batch that PyTorch's `DataLoader` hands to the loop.
pub(super) const LOADER: &str = "enumerate(DataLoader)";
/// The step of an optimizer of PyTorch.
pub(super) const OPTIMIZER: &str = "Optimizer.step";
/// The zeroing of the gradients by an optimizer of PyTorch.
pub(super) const ZERO_GRAD: &str = "Optimizer.zero_grad";

/// A kernel's name as people read it: without its arguments and without the parts that all such names have.
pub(super) fn brief(name: &str) -> String {
    let name = name.strip_prefix("void ").unwrap_or(name).replace("(anonymous namespace)::", "");
    let name = match name.as_str() {
        copy if copy.starts_with("Memcpy") || copy.starts_with("Memset") => copy,
        // CUTLASS names the computation within the brackets.
        name => match name.split_once("::Kernel<") {
            Some((_, inside)) => inside.split(['<', '>', ',']).next().unwrap_or(inside),
            None => name.split(['<', '(']).next().unwrap_or(name),
        },
    };
    let name = name.rsplit("::").next().filter(|of| !of.is_empty()).unwrap_or(name);
    name.chars().take(48).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_that_work_element_by_element_are_known_forward_and_backward() {
        let backward = |name: &str| format!("{EVALUATED}{name}");
        for name in
            ["aten::mul", "aten::add_", &backward("TanhBackward0"), &backward("ClampMinBackward1")]
        {
            assert!(is_elementwise(name), "{name}");
        }
        for name in [
            "aten::mm",
            "aten::addmm",
            "aten::sum",
            "mul",
            &backward("AddmmBackward0"),
            &backward("MulFoo"),
        ] {
            assert!(!is_elementwise(name), "{name}");
        }
    }

    #[test]
    fn calls_that_wait_or_allocate_are_known_by_the_names_of_cuda_and_hip() {
        for (call, is_wait, is_allocation) in [
            ("cudaStreamSynchronize", true, false),
            ("cuCtxSynchronize", true, false),
            ("cuEventSynchronize", true, false),
            ("hipCtxSynchronize", true, false),
            ("cudaMalloc", false, true),
            ("cudaHostAlloc", false, true),
            ("hipHostMalloc", false, true),
            ("hipHostAlloc", false, true),
            ("hipMallocHost", false, true),
            ("hipFreeHost", false, true),
            ("cudaStreamWaitEvent", false, false),
            ("cudaMemcpyAsync", false, false),
            ("Synchronize", false, false),
            ("Malloc", false, false),
        ] {
            assert_eq!((waits(call), allocates(call)), (is_wait, is_allocation), "{call}");
        }
    }

    #[test]
    fn names_of_real_kernels_say_what_they_do() {
        for (name, class) in [
            ("volta_sgemm_128x32_nt", Class::SinglePrecision),
            (
                "void gemmSN_TN_kernel<float, 128, 16, 2, 4>(cublasGemmSmallNParams)",
                Class::SinglePrecision,
            ),
            ("void gemmSN_TN_kernel<__half, 128, 16, 2, 4>(cublasGemmSmallNParams)", Class::Other),
            ("cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", Class::SinglePrecision),
            (
                "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>",
                Class::Other,
            ),
            (
                "void cutlass::Kernel<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>",
                Class::SinglePrecision,
            ),
            ("sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc", Class::Other),
            ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", Class::Layout),
            (
                "void at::native::vectorized_elementwise_kernel<4, at::native::X>",
                Class::Elementwise,
            ),
            ("Memcpy HtoD (Pageable -> Device)", Class::CopyIn { is_pageable: true }),
            ("Memcpy HtoD (Pinned -> Device)", Class::CopyIn { is_pageable: false }),
            ("Memcpy DtoH (Device -> Pageable)", Class::CopyOut),
            ("Memset (Device)", Class::Move),
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", Class::Communication),
            ("void deep_ep::internode::combine<false, 8>(int4*)", Class::Communication),
            ("void dpsk::ep::intranode::dispatch<8, 512>(int4*)", Class::Communication),
            (
                "void vllm::cross_device_reduce_1stage<half, 8>(vllm::RankData*)",
                Class::Communication,
            ),
        ] {
            assert_eq!(Class::of(name), class, "{name}");
        }
        assert_eq!(
            brief("void at::native::vectorized_elementwise_kernel<4, X>(int)"),
            "vectorized_elementwise_kernel"
        );
        assert_eq!(brief("Memcpy HtoD (Pageable -> Device)"), "Memcpy HtoD (Pageable -> Device)");
        let cutlass =
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64>(cutlass_80::Params)";
        assert_eq!(brief(cutlass), "cutlass_80_tensorop_s1688gemm_64x64");
        assert_eq!(
            brief("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>"),
            "CatArrayBatchedCopy"
        );
        assert_eq!(brief("(x"), "");
    }
}
