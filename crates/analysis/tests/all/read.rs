//! Handwritten traces, and what the reader reads in them.

use std::io::Read;

use crate::hostile::{self, Pieces};
use paceline_analysis::json::JsonError;
use paceline_analysis::read::parse;
use paceline_analysis::timeline::{
    Collective, DeviceWork, MemorySample, SyncWait, TimeRange, Timeline,
};

fn read(json: &str) -> Timeline {
    hostile::check(json.as_bytes());
    parse(json.as_bytes()).unwrap_or_else(|err| panic!("{err} in {json}"))
}

fn events(events: &str) -> Timeline {
    read(&format!("{{\"traceEvents\": [{events}]}}"))
}

fn count(counts: &std::collections::BTreeMap<String, u64>) -> Vec<(&str, u64)> {
    counts.iter().map(|(what, count)| (what.as_str(), *count)).collect()
}

fn time(start_ns: i64, dur_ns: i64) -> TimeRange {
    TimeRange { start_ns, dur_ns }
}

#[test]
fn the_events_of_a_cuda_trace() {
    let trace = read(
        r#"{
          "schemaVersion": 1,
          "deviceProperties": [{"id": 0, "name": "NVIDIA A100", "numSms": 108}, {"id": 1, "name": "B"}],
          "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8, "pg_config": [{"ranks": [0, 1]}]},
          "baseTimeNanoseconds": 1790857026000000000,
          "paceline": {"version": "0.1.0", "transport": "shm", "dropped": 0, "whole": true, "none": null, "x": [1]},
          "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 1, "args": {"name": "stream 7"}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": 10.001,
             "dur": 5.5, "args": {"cbid": 211, "correlation": 42}},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20, "dur": 3,
             "args": {"grid": [1, [2]], "stream": 7, "correlation": 42, "device": 0}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 24.5, "dur": 1,
             "args": {"stream": "7", "correlation": "43", "bytes": 4096, "memory bandwidth (GB/s)": 4.096}},
            {"ph": "X", "cat": "gpu_memset", "name": "Memset", "pid": 0, "tid": 7, "ts": 26, "dur": 0, "args": {}},
            {"ph": "X", "cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 7, "ts": 27, "dur": 1},
            {"args": {"stream": 20, "Collective name": "_allgather_base", "In msg nelems": 10,
                      "Out msg nelems": 80, "Group size": 8, "dtype": "Float", "Process Group Name": "0",
                      "Process Group Ranks": "[0, 1, 2]", "Seq": 9, "wait (us)": 1.25, "queue (us)": "2"},
             "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "pid": 0, "tid": 20, "ts": 30, "dur": 9},
            {"ph": "s", "id": 42, "pid": 1, "tid": 2, "ts": 10, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": 42, "pid": 0, "tid": 7, "ts": 20, "cat": "ac2g", "name": "ac2g", "bp": "e"},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#3", "pid": 0, "tid": 7, "ts": 1, "dur": 50},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 1, "tid": 2, "ts": 0, "dur": 60},
            {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 1, "tid": 2, "ts": 9, "dur": 7,
             "args": {"Input Dims": [[1, 2], []]}},
            {"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 2, "ts": 9, "dur": 7},
            {"ph": "C", "name": "queue", "pid": 1, "ts": 9, "args": {"depth": 1}},
            {"ph": "b", "cat": "x", "id": 1, "name": "async", "pid": 1, "ts": 9},
            {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 2, "ts": 11.5,
             "args": {"Total Reserved": 2048, "Total Allocated": 1024, "Bytes": -512, "Device Id": 0,
                      "Device Type": 1, "Addr": 140003652969600}},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 99}
          ],
          "traceName": "a \"name\" with \\ and \ud83d\ude80"
        }"#,
    );
    assert_eq!(
        (trace.rank, trace.world_size, trace.backend.as_deref()),
        (Some(3), Some(8), Some("nccl"))
    );
    assert_eq!(trace.base_ns, Some(1_790_857_026_000_000_000));
    assert_eq!(trace.devices, ["NVIDIA A100", "B"]);
    let run_facts: Vec<_> =
        trace.run_facts.iter().map(|(key, word)| (key.as_str(), word.as_str())).collect();
    assert_eq!(
        run_facts,
        [("dropped", "0"), ("transport", "shm"), ("version", "0.1.0"), ("whole", "true")]
    );

    let [gemm, copy, set, sync, gather] = trace.kernels[..] else { panic!("{:?}", trace.kernels) };
    assert_eq!(trace.names.text(gemm.name), "gemm");
    assert_eq!((gemm.work, gemm.time, gemm.stream), (DeviceWork::Kernel, time(20_000, 3_000), 7));
    assert_eq!((gemm.correlation, gemm.collective), (Some(42), None));
    let lane = &trace.lanes[gemm.lane.0 as usize];
    assert_eq!(
        (lane.pid.as_str(), lane.tid.as_str(), lane.name.as_deref()),
        ("0", "7", Some("stream 7"))
    );
    assert_eq!((copy.work, copy.time, copy.stream), (DeviceWork::Copy, time(24_500, 1_000), 7));
    assert_eq!(
        (copy.correlation, copy.bytes, copy.bandwidth_gb_s),
        (Some(43), Some(4096), Some(4.096))
    );
    assert_eq!((set.work, set.stream, set.correlation), (DeviceWork::Set, -1, None));
    assert_eq!((sync.work, sync.time), (DeviceWork::Sync, time(27_000, 1_000)));
    assert_eq!((gather.stream, gather.collective), (20, Some(0)));
    let expected = Collective {
        name: "_allgather_base".into(),
        in_elems: Some(10),
        out_elems: Some(80),
        dtype: Some("Float".into()),
        group_size: Some(8),
        group: Some("0".into()),
        group_ranks: Some("[0, 1, 2]".into()),
        seq: Some(9),
        wait_ns: Some(1_250),
        queue_ns: Some(2_000),
    };
    assert_eq!(trace.collectives, [expected]);

    let [launch] = trace.launches[..] else { panic!("{:?}", trace.launches) };
    assert_eq!((launch.time, launch.correlation), (time(10_001, 5_500), Some(42)));
    let [operator] = trace.operators[..] else { panic!("{:?}", trace.operators) };
    assert_eq!((operator.time, operator.collective), (time(9_000, 7_000), None));
    assert!(trace.annotations[0].is_device && !trace.annotations[1].is_device);
    assert_eq!(trace.annotations[1].time, time(0, 60_000));
    let sample =
        MemorySample { at_ns: 11_500, allocated_bytes: 1024, reserved_bytes: 2048, device_type: 1 };
    assert_eq!(trace.memory, [sample]);
    assert_eq!(
        count(&trace.skipped),
        [("ac2g", 2), ("ph C", 1), ("ph i", 1), ("python_function", 1), ("x", 1)]
    );
    assert_eq!(count(&trace.oddities), []);
}

/// A step of DDP over Gloo, as PyTorch 2 writes it. The transfer is an annotation on a thread of its own. Its
/// size stands in the shapes of its inputs.
#[test]
fn collectives_of_a_cpu_trace() {
    let trace = events(
        r#"{"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "ts": 1, "dur": 2,
            "args": {"Input type": ["float"], "Input Dims": [[31, 310]], "Input Strides": [[1]]}},
           {"ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "pid": 1, "tid": 1, "ts": 0, "dur": 1,
            "args": {"Input type": ["TensorList", "", "Scalar"], "Input Dims": [[[4], [5, 2]], [], []]}},
           {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 0, "dur": 1,
            "args": {"Collective name": "allreduce", "In msg nelems": 5, "Process Group Ranks": [0, 1]}},
           {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": 0, "dur": 1},
           {"ph": "X", "cat": "user_annotation", "name": "gloo:barrier", "pid": 1, "tid": 2, "ts": 4, "dur": 1},
           {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "pid": 1, "tid": 2, "ts": 4, "dur": 1}"#,
    );
    let names: Vec<_> = trace.operators.iter().map(|op| trace.names.text(op.name)).collect();
    assert_eq!(
        names,
        [
            "gloo:all_reduce",
            "c10d::allreduce_",
            "record_param_comms",
            "record_param_comms",
            "gloo:barrier"
        ]
    );
    let of: Vec<_> = trace.operators.iter().map(|op| op.collective).collect();
    assert_eq!(of, [Some(0), Some(1), Some(2), None, Some(3)]);
    let said: Vec<_> = trace
        .collectives
        .iter()
        .map(|c| (c.name.as_str(), c.in_elems, c.dtype.as_deref()))
        .collect();
    assert_eq!(
        said,
        [
            ("all_reduce", Some(9610), Some("float")),
            ("allreduce", Some(14), None),
            ("allreduce", Some(5), None),
            ("barrier", None, None)
        ]
    );
    assert_eq!(trace.annotations.len(), 1);
}

#[test]
fn begins_and_ends_are_paired_per_row() {
    let trace = events(
        r#"{"ph": "B", "cat": "cpu_op", "name": "outer", "pid": 1, "tid": 1, "ts": 1},
           {"ph": "B", "cat": "cpu_op", "name": "other row", "pid": 1, "tid": 2, "ts": 2},
           {"ph": "B", "cat": "kernel", "name": "inner", "pid": 1, "tid": 1, "ts": 3, "args": {"stream": 5}},
           {"ph": "E", "pid": 1, "tid": 1, "ts": 4},
           {"ph": "E", "pid": 1, "tid": 1, "ts": 6},
           {"ph": "B", "cat": "nobody knows", "name": "x", "pid": 1, "tid": 2, "ts": 5},
           {"ph": "E", "pid": 1, "tid": 2, "ts": 6},
           {"ph": "E", "pid": 1, "tid": 2, "ts": 7},
           {"ph": "E", "pid": 1, "tid": 2, "ts": 8},
           {"ph": "B", "cat": "cpu_op", "name": "late", "pid": 1, "tid": 1, "ts": 9},
           {"ph": "B", "cat": "cpu_op", "name": "later", "pid": 1, "tid": 1, "ts": 10},
           {"ph": "X", "cat": "python_function", "name": "f", "pid": 1, "tid": 1, "ts": 9, "dur": 11},
           {"ph": "E", "pid": 1, "tid": 3}"#,
    );
    let said: Vec<_> =
        trace.operators.iter().map(|op| (trace.names.text(op.name), op.time)).collect();
    assert_eq!(
        said,
        [
            ("outer", time(1_000, 5_000)),
            ("other row", time(2_000, 5_000)),
            ("later", time(10_000, 10_000)),
            ("late", time(9_000, 11_000))
        ]
    );
    assert_eq!((trace.kernels[0].time, trace.kernels[0].stream), (time(3_000, 1_000), 5));
    assert_eq!(count(&trace.skipped), [("nobody knows", 1), ("python_function", 1)]);
    assert_eq!(
        count(&trace.oddities),
        [("a B without its E", 2), ("an E without a ts", 1), ("an E without its B", 1)]
    );
}

#[test]
fn what_is_odd_is_counted_and_read_on() {
    let trace = events(
        r#"{"ph": "X", "cat": "kernel", "name": "back", "ts": 10, "dur": -4},
           {"ph": "X", "cat": "kernel", "name": "no dur", "ts": 10},
           {"ph": "X", "cat": "kernel", "name": "NaN", "ts": 10, "dur": NaN},
           {"ph": "X", "cat": "kernel", "name": "no ts", "dur": 1},
           {"ph": "X", "cat": "kernel", "name": "too late", "ts": 1e300, "dur": 1},
           {"ph": "X", "cat": "kernel", "name": "words", "ts": "soon", "dur": 1},
           {"ph": "X", "cat": "kernel", "name": "quoted", "ts": "-1.5", "dur": "2"},
           {"ph": "X", "cat": "kernel", "name": "far", "ts": 9223372036854775.0, "dur": 9223372036854775.0},
           {"ph": "B", "cat": "kernel", "name": "b", "ts": 5}, {"ph": "E", "ts": 4},
           {"ph": "B"},
           {"ph": "i", "name": "[memory]", "ts": 5, "args": {"Total Reserved": 1}},
           {"ph": "i", "name": "[memory]", "args": {"Total Allocated": 1}},
           {"ph": "?"}, {}, 7, "x", null, [1],
           {"ph": "X", "cat": "kernel", "name": ["x"], "ts": 1, "dur": 1, "args": [1], "pid": {}, "tid": true}"#,
    );
    let times: Vec<_> =
        trace.kernels.iter().map(|kernel| (kernel.time.start_ns, kernel.time.dur_ns)).collect();
    let far = 9_223_372_036_854_775_000;
    assert_eq!(
        times,
        [
            (10_000, 0),
            (10_000, 0),
            (10_000, 0),
            (-1_500, 2_000),
            (far, far),
            (5_000, 0),
            (1_000, 1_000)
        ]
    );
    assert_eq!(trace.kernels[4].time.end_ns(), i64::MAX);
    assert_eq!(
        count(&trace.oddities),
        [
            ("a B without a ts", 1),
            ("a memory sample without a total", 1),
            ("a memory sample without a ts", 1),
            ("an X without a dur", 2),
            ("an X without a ts", 3),
            ("negative duration", 2),
            ("not an object among the events", 4)
        ]
    );
    assert_eq!(count(&trace.skipped), [("ph ", 1), ("ph ?", 1)]);
}

#[test]
fn an_array_of_events_and_late_metadata_are_read() {
    let trace = read(r#" [ {"ph": "X", "cat": "Kernel", "name": "k", "ts": 1, "dur": 1} ] "#);
    assert_eq!(trace.kernels.len(), 1);
    let trace = read(r#"{"traceEvents": [], "distributedInfo": {"rank": "1", "world_size": 2.0}}"#);
    assert_eq!((trace.rank, trace.world_size), (Some(1), Some(2)));
    let trace = read(
        r#"{"traceEvents": null, "distributedInfo": [], "deviceProperties": {}, "paceline": 1}"#,
    );
    assert_eq!((trace.rank, trace.devices.len(), trace.run_facts.len()), (None, 0, 0));
    // No rank and no world can have these numbers, and no table of so many missing ranks should be built.
    let trace = read(r#"{"distributedInfo": {"rank": -1, "world_size": 99999999999}}"#);
    assert_eq!((trace.rank, trace.world_size), (None, None));
}

#[test]
fn broken_json_names_the_byte() {
    let deep = format!("{{\"x\": {}", "[".repeat(200));
    for (json, message) in [
        ("", "at byte 0 of the JSON: expected an object, found the end of the file"),
        ("7", "at byte 0 of the JSON: expected an object, found '7'"),
        (
            "{\"traceEvents\": [{\"ph\": \"X\"",
            "at byte 27 of the JSON: expected ',' or '}', found the end of the file",
        ),
        ("{\"traceEvents\": [{\"ph\" \"X\"}]}", "at byte 23 of the JSON: expected ':', found '\"'"),
        ("{\"traceEvents\": [{\"ph\": X}]}", "at byte 24 of the JSON: expected a value, found 'X'"),
        ("{\"traceEvents\": [{}, ]}", "at byte 21 of the JSON: expected a value, found ']'"),
        ("{\"traceEvents\": [{},, {}]}", "at byte 20 of the JSON: expected a value, found ','"),
        ("{\"traceEvents\": [{} {}]}", "at byte 20 of the JSON: expected ',' or ']', found '{'"),
        (
            "{\"traceEvents\": [] \"x\": 1}",
            "at byte 19 of the JSON: expected ',' or '}', found '\"'",
        ),
        ("{\"a\": 1,}", "at byte 8 of the JSON: expected a key in quotes, found '}'"),
        ("{} {}", "at byte 3 of the JSON: expected the end of the file, found '{'"),
        ("{\"a\": [1, {]}", "at byte 11 of the JSON: expected '}', found ']'"),
        ("{\"a\": [1, 2}", "at byte 11 of the JSON: expected ']', found '}'"),
        ("{\"a\": \"b", "at byte 8 of the JSON: expected '\"', found the end of the file"),
        (
            "{\"a\\x\": 1}",
            "at byte 4 of the JSON: expected one of \" \\ / b f n r t u after a backslash, found 'x'",
        ),
        ("{\"\\u12g4\": 1}", "at byte 6 of the JSON: expected four hexadecimal digits, found 'g'"),
        ("[{\"ts\": 1.2.3}]", "at byte 8 of the JSON: expected a number, found '1'"),
        ("[{\"ts\": nulls}]", "at byte 8 of the JSON: expected a value, found 'n'"),
        ("{\"a\": \u{1}}", "at byte 6 of the JSON: expected a value, found the byte 0x01"),
        (
            &deep,
            "at byte 133 of the JSON: objects and arrays lie more than 128 deep within each other",
        ),
    ] {
        hostile::check(json.as_bytes());
        // The message is the same for all sizes of the pieces in which the file comes.
        for piece in [1, 3, 1 << 20] {
            let err = parse(Pieces { rest: json.as_bytes(), piece }).expect_err(json);
            assert_eq!(err.to_string(), message, "{json}");
        }
    }
}

#[test]
fn a_file_that_comes_in_pieces_reads_the_same() {
    let json = r#"{"distributedInfo" : {"rank": 1},"traceEvents": [
        {"ph": "X" , "cat":"kernel", "na\u006de": "caf\u00e9 \ud83d\ude80 \n\"q\" \ud800 \udc00\ud800\ud83d\ude80",
         "ts": -123.4567e1, "dur": 12e0, "args": {"stream": -1, "x": -Infinity, "skipped \" one": "a\\\"b", "y": NaN}}]}"#;
    for piece in [1, 2, 3, 7, 64, 1 << 20] {
        let trace = parse(Pieces { rest: json.as_bytes(), piece }).expect("it is well formed");
        let kernel = trace.kernels[0];
        let name = trace.names.text(kernel.name);
        assert_eq!(name, "café 🚀 \n\"q\" \u{fffd} \u{fffd}\u{fffd}🚀");
        assert_eq!(
            (trace.rank, kernel.time, kernel.stream),
            (Some(1), time(-1_234_567, 12_000), -1)
        );
    }
}

#[test]
fn bytes_that_are_no_text_are_replaced() {
    let trace = parse(
        &b"[{\"ph\": \"X\", \"cat\": \"kernel\", \"ts\": 1, \"dur\": 1, \"name\": \"a\xffb\"}]"[..],
    )
    .expect("strings may hold anything");
    assert_eq!(trace.names.text(trace.kernels[0].name), "a\u{fffd}b");
}

#[test]
fn an_input_that_fails_is_an_error() {
    struct Failing;
    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("the disk is gone"))
        }
    }
    let err: JsonError = parse((&b"{\"traceEvents\": ["[..]).chain(Failing)).expect_err("it fails");
    assert_eq!(err.to_string(), "at byte 17 of the JSON: reading failed: the disk is gone");
}

#[test]
fn what_a_wait_of_the_device_waits_for() {
    let trace = events(
        r#"{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 1},
           {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 20, "ts": 3, "dur": 1,
            "args": {"stream": 20, "correlation": 9, "wait_on_stream": 7,
                     "wait_on_cuda_event_record_corr_id": 8}},
           {"ph": "X", "cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 20, "ts": 5, "dur": 1,
            "args": {"stream": 20, "correlation": 10, "wait_on_stream": -1}}"#,
    );
    assert_eq!(trace.sync_waits, [SyncWait { kernel: 1, stream: 7, record: 8 }]);
}

/// Writers that sort the keys of objects put the arguments of an event before its name, and the events last.
#[test]
fn sorted_keys_are_read_like_others() {
    let json = |value: serde_json::Value| value.to_string();
    let events = serde_json::json!([
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2,
            "args": {"Input Dims": [[2, 3], [3, 5]], "Input Strides": [[3, 1], [5, 1]], "Input type": ["float", "float"]}},
        {"ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "pid": 1, "tid": 1, "ts": 4, "dur": 2,
            "args": {"Input Dims": [[[4], [5]], []], "Input type": ["TensorList", "float"]}},
    ]);
    // `serde_json` sorts keys.
    let sorted =
        read(&json(serde_json::json!({"distributedInfo": {"rank": 3}, "traceEvents": events})));
    let product = sorted.products[0];
    assert_eq!((product.flops, sorted.names.text(product.dtype)), (60, "float"));
    assert_eq!((sorted.collectives[0].in_elems, sorted.rank), (Some(9), Some(3)));
}

/// PyTorch 1.8 wrote how much each change was, and no totals.
#[test]
fn changes_of_memory_are_added_up() {
    let event = |ts: i64, device: i64, bytes: i64| {
        format!(
            "{{\"ph\":\"i\",\"name\":\"[memory]\",\"pid\":1,\"tid\":1,\"ts\":{ts},\"args\":{{\"Device Type\":{device},\
             \"Device Id\":-1,\"Bytes\":{bytes}}}}}"
        )
    };
    // Not in order of time. 300 bytes of device 1 were there before.
    let all = [
        event(15, 0, 400),
        event(500, 0, -400),
        event(30, 1, 100),
        event(40, 1, -400),
        event(20, 0, 8),
    ];
    let trace = events(&all.join(","));
    let found: Vec<_> = trace
        .memory
        .iter()
        .map(|of| (of.at_ns / 1000, of.device_type, of.allocated_bytes))
        .collect();
    assert_eq!(found, [(15, 0, 400), (20, 0, 408), (30, 1, 400), (40, 1, 0), (500, 0, 8)]);
    assert!(trace.has_summed_memory && trace.oddities.is_empty(), "{:?}", trace.oddities);
    let extreme =
        events(&[event(1, 0, i64::MIN), event(2, 0, i64::MAX), event(3, 0, i64::MAX)].join(","));
    assert_eq!(extreme.memory.len(), 3);
}
