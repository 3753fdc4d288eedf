//! Steps that look like a fault and have another one or none, and causes whose remedy depends on what else the trace shows.

use super::*;
use crate::doctor::Advice;
use crate::timeline::MemorySample;

/// Steps of a device that each do this work.
fn each_step(work: impl Fn(&mut Machine)) -> Timeline {
    let mut m = Machine::new(0);
    for number in 0..STEPS {
        m.begin(&format!("ProfilerStep#{number}"), false);
        work(&mut m);
        m.end();
    }
    m.timeline
}

fn advice(timeline: Timeline) -> Vec<Advice> {
    diagnose(&[timeline]).advice
}

#[track_caller]
fn assert_silent(timeline: Timeline) {
    let said: Vec<String> = advice(timeline).iter().map(Advice::words).collect();
    assert_eq!(said, [""; 0]);
}

fn within(m: &mut Machine, operator: &str, kernel: &str, us: f64) {
    m.operator(operator, |m| {
        m.compute(kernel, us);
    });
}

/// A layer whose attention is one kernel, and whose router has a softmax a few kernels from the products of the experts.
#[test]
fn the_softmax_of_a_router_is_no_attention() {
    assert_silent(each_step(|m| {
        for _ in 0..8 {
            within(m, "aten::bmm", GEMM, 200.0);
            within(m, "aten::gelu", ELEMENTWISE, 20.0);
            within(m, "aten::bmm", GEMM, 200.0);
            within(m, "aten::native_layer_norm", "void vectorized_layer_norm_kernel<float>", 20.0);
            within(m, "flash_attn::_flash_attn_forward", "void flash_fwd_kernel<>", 500.0);
            within(m, "aten::mm", GEMM, 50.0);
            within(m, "aten::_softmax", "void cunn_SoftMaxForward<8, float>", 10.0);
            within(m, "aten::topk", "void sbtopk::gatherTopK<float>", 10.0);
        }
        m.synchronize("cudaStreamSynchronize");
    }));
}

/// Four layers of attention that is not fused, in PyTorch's own function or written by hand.
#[test]
fn attention_gets_the_remedy_that_it_lacks() {
    let layers = |is_math: bool| {
        let own = |m: &mut Machine| {
            within(m, "aten::bmm", GEMM, 100.0);
            within(m, "aten::_softmax", "void cunn_SoftMaxForward<8, float>", 400.0);
            within(m, "aten::bmm", GEMM, 100.0);
        };
        let found = advice(each_step(|m| {
            for _ in 0..8 {
                if is_math {
                    m.operator("aten::scaled_dot_product_attention", |m| {
                        m.operator("aten::_scaled_dot_product_attention_math", own);
                    });
                } else {
                    own(m);
                }
                m.gemms(2, 200.0);
            }
        }));
        assert_eq!(found.iter().map(|of| of.cause.key).collect::<Vec<_>>(), ["attention"]);
        (found[0].title.clone(), found[0].change.clone())
    };
    let (title, change) = layers(true);
    assert!(title.contains("math") && change.contains("sdpa_kernel"), "{title}: {change}");
    let (title, change) = layers(false);
    assert_eq!(title, "Attention is not fused");
    // A model without a mask would become another one.
    assert!(change.contains("attention(q, k, v)\n") && change.contains("if it is causal"));
}

#[test]
fn numbers_made_on_the_processor_get_a_function_of_pytorch() {
    for (operator, change) in [
        ("aten::uniform_", "torch.rand(..., device=device)"),
        ("aten::normal_", "torch.randn(..., device=device)"),
        ("aten::bernoulli", "torch.bernoulli(p.to(device))"),
        ("aten::sort", "move this work"),
    ] {
        let found = advice(each_step(|m| {
            m.operator(operator, |m| m.host(12_000.0));
            m.gemms(20, 200.0);
        }));
        assert_eq!(found[0].cause.key, "host_work");
        assert!(found[0].change.starts_with(change), "{operator}: {}", found[0].change);
    }
}

/// Gradients of embeddings, which no fused step accepts.
#[test]
fn the_optimizer_of_sparse_gradients_gets_no_advice() {
    let mut timeline = steps(0, Fault::planted("optimizer"), 1.0);
    timeline.names.intern("aten::embedding_sparse_backward");
    assert_silent(timeline);
}

#[test]
fn without_memory_in_the_trace_nothing_is_promised_for_recomputation() {
    let found = advice(steps(0, Fault::planted("recomputation"), 1.0));
    assert_eq!(found[0].title, "Activations are computed again");
    assert_eq!(found[0].gain.low_ms, 0.0);
}

/// The numbers of a text.
fn numbers(text: &str) -> Vec<f64> {
    let is_number = |letter: char| letter.is_ascii_digit() || letter == '.';
    text.split(|letter| !is_number(letter)).filter_map(|of| of.parse().ok()).collect()
}

/// All-reduces of f32 beside longer all-gathers of bf16.
#[test]
fn the_exposed_part_is_one_of_the_same_collectives() {
    let found = advice(each_step(|m| {
        m.gemms(8, 500.0);
        m.collective("allreduce", ALL_REDUCE, 800.0);
        m.collective("_allgather_base", "ncclDevKernel_AllGather_RING_LL_bf16", 1200.0);
        m.join();
    }));
    let exposed = found.iter().find(|of| of.cause.key == "exposed").unwrap();
    let said = numbers(&exposed.evidence.text);
    assert!(said[0] <= said[1] && exposed.evidence.text.contains("all_gather"), "{said:?}");
}

/// The broadcast of buffers goes by an advice of its own.
#[test]
fn a_collective_that_an_advice_takes_away_is_not_named_again() {
    let found = advice(steps(0, Fault::Planted(["buffers", "exposed", ""]), 1.0));
    let text = |cause: &str| {
        found.iter().find(|of| of.cause.key == cause).map(|of| of.evidence.text.as_str())
    };
    assert!(text("buffers").unwrap().starts_with("1 broadcasts"));
    let exposed = text("exposed").unwrap();
    assert_eq!(numbers(exposed)[1], 6.0);
    assert!(exposed.contains("(4 calls, mostly all_reduce)"), "{exposed}");
}

#[test]
fn all_to_alls_get_the_remedy_of_their_library() {
    for (operator, change) in
        [("aten::mm", "micro-batch"), ("fbgemm::lookup", "TrainPipelineSparseDist")]
    {
        let found = advice(each_step(|m| {
            within(m, operator, GEMM, 2000.0);
            m.collective("all_to_all", "void deep_ep::intranode::dispatch<8, 512>(int4*)", 3000.0);
            m.join();
        }));
        let exposed = found.iter().find(|of| of.cause.key == "exposed").unwrap();
        assert!(exposed.change.contains(change), "{operator}: {}", exposed.change);
    }
}

/// Without a span of the optimizer, the replay would compute the next step beside the exchange of gradients that it needs.
#[test]
fn a_wait_of_the_host_gains_no_more_than_the_device_is_idle() {
    let timeline = each_step(|m| {
        m.gemms(8, 500.0);
        m.collective("allreduce", ALL_REDUCE, 4000.0);
        m.join();
        m.synchronize("cudaDeviceSynchronize");
        m.host(400.0);
    });
    let ns: i64 = timeline.kernels.iter().map(|of| of.time.dur_ns).sum();
    let Diagnosis { advice, step_ms, .. } = diagnose(&[timeline]);
    let found = advice.iter().find(|of| of.cause.key == "synchronizations").unwrap();
    let idle_ms = step_ms.unwrap() - ns as f64 / 1e6 / STEPS as f64;
    assert!(found.gain.high_ms <= idle_ms + 0.01, "{:?} of {idle_ms}", found.gain);
}

#[test]
fn the_wait_for_the_loader_is_not_one_for_launches() {
    let found = advice(steps(0, Fault::Planted(["loader", "host_bound", ""]), 1.0));
    let bound = found.iter().find(|of| of.cause.key == "host_bound").unwrap();
    // The loader takes 15 ms of each step.
    let idle_ms = numbers(&bound.evidence.text)[2];
    assert!(idle_ms < 15.0 && bound.evidence.dur_us < 15_000.0, "{}", bound.evidence.text);
}

/// Megatron gathers activations before a product, and scatters them after it.
#[test]
fn gathered_activations_are_no_parameters_of_fsdp() {
    let found = advice(each_step(|m| {
        for _ in 0..6 {
            m.collective("_allgather_base", "ncclDevKernel_AllGather_RING_LL", 300.0);
            m.join();
            m.gemms(1, 400.0);
            m.collective("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_RING_LL", 300.0);
            m.join();
        }
    }));
    let said: Vec<&str> = found.iter().map(|of| of.cause.key).collect();
    assert_eq!(said, ["exposed"]);
    assert!(found[0].change.starts_with("overlap"), "{}", found[0].change);
}

/// Layers of LoRA and of other libraries call operators of the forward pass in their backward pass.
#[test]
fn an_operator_within_a_function_of_the_program_is_no_second_forward_pass() {
    for (function, expected) in
        [("AddmmBackward0", &["recomputation"][..]), ("MyLinearFunctionBackward", &[])]
    {
        let found = advice(each_step(|m| {
            for _ in 0..8 {
                m.operator(&format!("autograd::engine::evaluate_function: {function}"), |m| {
                    m.operator("aten::linear", |m| m.gemms(1, 200.0));
                    m.gemms(1, 200.0);
                });
            }
        }));
        assert_eq!(found.iter().map(|of| of.cause.key).collect::<Vec<_>>(), expected, "{function}");
    }
}

#[test]
fn memory_that_is_allocated_in_the_loop_gets_the_remedy_of_its_allocator() {
    for (call, device_types, change) in [
        ("cudaMalloc", &[][..], "PYTORCH_CUDA_ALLOC_CONF"),
        ("cudaMalloc", &[0, 1], "PYTORCH_CUDA_ALLOC_CONF"),
        ("hipMalloc", &[0], "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ("cudaHostAlloc", &[], "DataLoader(dataset, pin_memory=True)"),
    ] {
        let mut timeline = each_step(|m| {
            m.gemms(8, 200.0);
            m.synchronize("cudaFree");
            for _ in 0..8 {
                let from = m.now;
                m.host(300.0);
                m.call(call, from, None);
            }
        });
        let sample = |device_type: &i64| {
            let device_type = *device_type;
            MemorySample { at_ns: 0, allocated_bytes: 0, reserved_bytes: 0, device_type }
        };
        timeline.memory.extend(device_types.iter().map(sample));
        let found = advice(timeline);
        assert_eq!(found[0].cause.key, "allocation");
        assert!(found[0].change.starts_with(change), "{call}: {}", found[0].change);
    }
}

#[test]
fn of_several_optimizers_the_slow_one_is_named() {
    for (kernel, count) in [(FUSED, 1), (ELEMENTWISE, 8)] {
        let found = advice(each_step(|m| {
            m.gemms(8, 100.0);
            for (name, kernel, count) in [("AdamW", kernel, count), ("RMSprop", ELEMENTWISE, 200)] {
                m.span(&format!("Optimizer.step#{name}.step"), |m| {
                    (0..count).for_each(|_| {
                        m.compute(kernel, 12.0);
                    });
                });
            }
        }));
        assert_eq!(found[0].change, "torch.optim.RMSprop(params, foreach=True)");
        assert!(found[0].evidence.text.starts_with("200 kernels"), "{}", found[0].evidence.text);
    }
}
