//! Made-up traces as PyTorch's profiler writes them on a GPU: every rank has the same four steps, in
//! which a higher rank computes longer and waits less.

use serde_json::{Value, json};

use super::Sandbox;

/// The kind of communication in a made-up run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Training {
    /// All-reduces.
    Ddp,
    /// All-gathers and reduce-scatters.
    Sharding,
}

/// The trace of a rank; `scale` makes all its work longer.
pub fn trace(rank: usize, world: usize, training: Training, scale: f64) -> Value {
    let mut events = Vec::new();
    let mut correlation = 0;
    for step in 0..4 {
        let begin = 1000.0 + 2000.0 * f64::from(step) * scale;
        events.push(span("ProfilerStep#", step, begin, 1900.0 * scale));
        events.push(span("forward", -1, begin, 600.0 * scale));
        events.push(span("backward", -1, begin + 600.0 * scale, 1000.0 * scale));
        events.push(span("optimizer_step", -1, begin + 1650.0 * scale, 200.0 * scale));
        let longer = 40.0 * rank as f64;
        let mut work = vec![
            ("sm80_xmma_gemm_forward", 7, 20.0, 500.0 + longer, None),
            ("sm80_xmma_gemm_backward", 7, 640.0, 800.0, None),
            ("Memcpy HtoD (Pinned -> Device)", 7, 5.0, 10.0, None),
            ("vectorized_elementwise_kernel", 7, 1680.0, 120.0, None),
        ];
        work.extend(match training {
            Training::Ddp => vec![(
                "ncclDevKernel_AllReduce_Sum_f32",
                20,
                1000.0 + longer,
                600.0 - longer,
                Some("allreduce"),
            )],
            Training::Sharding => vec![
                ("ncclDevKernel_AllGather_RING_LL", 20, 30.0, 200.0, Some("_allgather_base")),
                (
                    "ncclDevKernel_ReduceScatter_Sum_f32",
                    20,
                    1000.0 + longer,
                    500.0 - longer,
                    Some("_reduce_scatter_base"),
                ),
            ],
        });
        for (name, stream, start, dur, collective) in work {
            correlation += 1;
            let at = begin + start * scale;
            events.push(
                json!({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1,
                "tid": 1, "ts": at - 4.0, "dur": 3.0, "args": {"correlation": correlation}}),
            );
            let mut args = json!({"stream": stream, "correlation": correlation, "device": 0});
            let cat = if name.starts_with("Memcpy") {
                args["bytes"] = json!(65536);
                args["memory bandwidth (GB/s)"] = json!(6.5);
                "gpu_memcpy"
            } else {
                "kernel"
            };
            if let Some(collective) = collective {
                args["Collective name"] = json!(collective);
                args["Seq"] = json!(step);
                args["Group size"] = json!(world);
                args["Process Group Name"] = json!("0");
            }
            events.push(
                json!({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": at,
                "dur": dur * scale, "args": args}),
            );
        }
        for (at, allocated) in [(10.0, 400 << 20), (900.0, 900 << 20), (1700.0, 500 << 20)] {
            events.push(json!({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1,
                "tid": 1, "ts": begin + at * scale, "s": "t", "args": {"Device Type": 1, "Device Id": 0,
                "Bytes": 1024, "Addr": 1, "Total Allocated": allocated, "Total Reserved": 1 << 30}}));
        }
    }
    json!({"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        "deviceProperties": [{"id": 0, "name": "A made-up device"}], "traceEvents": events})
}

fn span(name: &str, number: i32, ts: f64, dur: f64) -> Value {
    let name = if number < 0 { name.to_owned() } else { format!("{name}{number}") };
    json!({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
        "args": {}})
}

/// Writes the traces of all ranks below `folder`.
pub fn write_traces(sandbox: &Sandbox, folder: &str, world: usize, training: Training) {
    for rank in 0..world {
        let text = trace(rank, world, training, 1.0).to_string();
        let file = format!("{folder}/rank_{rank}/worker_{rank}.1700.pt.trace.json");
        sandbox.write(&file, text.as_bytes());
    }
}

/// A trace of PyTorch on the processor: six steps with gradients of 1, 1, 1 and 3 MiB, final every 10 ms, the last one at the end
/// of the backward pass. They travel in buckets of 2 and 4 MiB, at 8 ms for each MiB.
pub fn pytorch_ddp(rank: usize, with_shapes: bool) -> String {
    let mut events = Vec::new();
    let mut event = |category: &str,
                     name: &str,
                     tid: usize,
                     from: usize,
                     to: usize,
                     elems: usize| {
        let shapes = if with_shapes && elems > 0 {
            format!(r#","Input Dims":[[{elems}]],"Input type":["float"]"#)
        } else {
            String::new()
        };
        events.push(format!(
            r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":1,"tid":{tid},"ts":{},"dur":{},"args":{{"Ev Idx":0{shapes}}}}}"#,
            1000 * from,
            1000 * (to - from)
        ));
    };
    const MIB: usize = (1 << 20) / 4;
    for step in 0..6 {
        let begin = 200 * step;
        event("user_annotation", &format!("ProfilerStep#{step}"), 1, begin, begin + 150, 0);
        event("cpu_op", "aten::linear", 1, begin, begin + 20, 0);
        for (at, elems) in [(30, MIB), (40, MIB), (50, MIB), (60, 3 * MIB)] {
            let name = "torch::autograd::AccumulateGrad";
            let function = format!("autograd::engine::evaluate_function: {name}");
            event("cpu_op", &function, 1, begin + at - 8, begin + at, 0);
            event("cpu_op", name, 1, begin + at - 1, begin + at, elems);
        }
        event("user_annotation", "gloo:all_reduce", 2, begin + 40, begin + 56, 2 * MIB);
        event("user_annotation", "gloo:all_reduce", 2, begin + 60, begin + 92, 4 * MIB);
        event("cpu_op", "aten::add_", 1, begin + 100, begin + 110, 0);
    }
    format!(
        r#"{{"traceEvents":[{}],"distributedInfo":{{"backend":"gloo","rank":{rank},"world_size":2}}}}"#,
        events.join(",")
    )
}
