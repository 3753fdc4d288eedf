//! What our recorder writes has the form that other tools expect, and is what our reader reads.

use std::io::{self, Write};
use std::path::PathBuf;

use paceline_analysis::kineto::{self, Header, RanOn};
use paceline_analysis::limit::Operations;
use paceline_analysis::read::{self, Select, find, open};
use paceline_analysis::timeline::{Collective, MemorySample, TimeRange};
use paceline_trace::{Event, Operation, OperationTimes, Place, Recorder, Shapes, Span, Track};
use serde_json::{Value, json};

fn span(start_ns: u64, end_ns: u64) -> Span {
    Span { start_ns, end_ns }
}

fn header(rank: usize) -> Header {
    Header {
        rank,
        world_size: 2,
        run_id: "17".into(),
        transport: "shm".into(),
        device: "a processor".into(),
        ran_on: RanOn::Host,
        pid: 500,
        base_ns: 1_700_000_000_000_000_000,
        run_facts: vec![("dropped_events".into(), "0".into())],
        steps: vec![(3, span(1_000, 9_000))],
        activities: Vec::new(),
    }
}

fn recorder() -> Recorder {
    let mut recorder = Recorder::new();
    let main = recorder.track("main", 100);
    recorder.set_on(true);
    main.record(Event::Span { name: "forward", span: span(1000, 3000) });
    let mut shapes = Shapes::new([&[64, 28][..], &[3]]);
    (shapes.flop, shapes.bytes) = (1000, 400);
    main.record(Event::Kernel {
        name: "conv2d_forward",
        launched: Span::at(1100),
        span: span(1100, 2101),
        shapes,
    });
    main.record(Event::Copy {
        launched: Span::at(2200),
        span: span(2200, 2300),
        bytes: 200,
        places: (Place::Pageable, Place::Pageable),
    });
    main.record(Event::Operation(Operation {
        group: 0,
        name: "all_reduce",
        reduction: "sum",
        dtype: "f32",
        seq: 7,
        in_elems: 10,
        out_elems: 11,
        times: OperationTimes {
            submitted_ns: 2400,
            started_ns: 2500,
            present_ns: 2701,
            finished_ns: 3500,
        },
    }));
    main.record(Event::Memory {
        at_ns: 2600,
        category: "activations",
        delta_bytes: -64,
        allocated_bytes: 128,
        reserved_bytes: 256,
        address: 4096,
    });
    main.record(Event::Counter { name: "loss", at_ns: 8000, value: 0.25 });
    main.record(Event::Mark { name: "gradient_ready", at_ns: 8100, id: 4 });
    recorder
}

fn events_named<'a>(trace: &'a Value, cat: &str) -> Vec<&'a Value> {
    trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["cat"] == cat).collect()
}

fn tracks(recorder: &Recorder) -> Vec<&Track> {
    recorder.tracks().iter().map(AsRef::as_ref).collect()
}

#[test]
fn an_operation_is_set_against_its_limit() {
    for (speeds, limit_ns, share) in [
        // Arithmetic is the limit, or memory is.
        ("2000000000 1000000000", Some(500.0), "50"),
        ("2000000000 500000000", Some(800.0), "80"),
        ("2000000000", None, "\u{2013}"),
    ] {
        let mut header = header(1);
        header.run_facts.push(("speeds".into(), speeds.into()));
        let (recorder, mut bytes) = (recorder(), Vec::new());
        kineto::write(&mut bytes, &header, &tracks(&recorder)).unwrap();
        let of = Operations::of(&[read::parse(&bytes[..]).unwrap()]);
        let [one] = &of.all[..] else { panic!("{of:?}") };
        assert_eq!(
            (one.name.as_str(), one.shape.as_str()),
            ("paceline::conv2d_forward", "64x28 3")
        );
        assert_eq!((one.flop, one.bytes, one.time_ns), (1000, 400, 1001));
        assert_eq!((one.limit_ns, of.steps, of.steps_ns), (limit_ns, 1, 8000));
        let table = of.table(5);
        let shown = table.rows[1].last().unwrap().shown(table.columns.last().unwrap());
        assert_eq!(shown, share);
    }
}

#[test]
fn a_trace_has_the_form_that_tools_read() {
    let recorder = recorder();
    let mut bytes = Vec::new();
    let count = kineto::write(&mut bytes, &header(1), &tracks(&recorder)).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    assert!(text.contains("\"rank\": 1,"), "the pattern of Holistic Trace Analysis");
    assert!(text.find("distributedInfo") < text.find("schemaVersion"));
    let trace: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(trace["traceEvents"].as_array().unwrap().len() as u64, count);
    assert_eq!(trace["paceline"]["dropped_events"], "0");
    assert_eq!(trace["distributedInfo"]["run_id"], "17");

    let steps = events_named(&trace, "user_annotation");
    assert_eq!((&steps[0]["name"], &steps[0]["ts"]), (&json!("ProfilerStep#3"), &json!(1.0)));
    assert_eq!(steps[1]["name"], "forward");

    let kernels = events_named(&trace, "kernel");
    assert_eq!((&kernels[0]["ts"], &kernels[0]["dur"]), (&json!(1.1), &json!(1.001)));
    assert_eq!(kernels[0]["args"]["stream"], 7);
    assert_eq!(kernels[1]["name"], "ncclDevKernel_AllReduce_Sum_f32_Shm");
    let args = &kernels[1]["args"];
    assert_eq!((&args["Seq"], &args["Group size"]), (&json!(7), &json!(2)));
    assert_eq!((&args["queue (us)"], &args["wait (us)"]), (&json!(0.1), &json!(0.201)));
    assert_eq!(args["Process Group Ranks"], "[0, 1]");

    let copy = events_named(&trace, "gpu_memcpy")[0];
    assert_eq!(copy["args"]["memory bandwidth (GB/s)"], 2);
    let operator = events_named(&trace, "cpu_op")[0];
    assert_eq!(
        (&operator["args"]["FLOP"], &operator["args"]["bytes"]),
        (&json!(1000), &json!(400))
    );
    assert_eq!(operator["args"]["Input Dims"], json!([[64, 28], [3]]));

    // Every kernel and copy has a launch, and an arrow from the launch to it.
    let launches = events_named(&trace, "cuda_runtime");
    let arrows = events_named(&trace, "ac2g");
    for device in kernels.iter().chain([&copy]) {
        let id = &device["args"]["correlation"];
        let launch = launches.iter().find(|e| e["args"]["correlation"] == *id).unwrap();
        let ends: Vec<_> = arrows.iter().filter(|e| e["id"] == *id).collect();
        assert_eq!((&ends[0]["ph"], &ends[0]["ts"]), (&json!("s"), &launch["ts"]));
        assert_eq!((&ends[1]["ph"], &ends[1]["ts"]), (&json!("f"), &device["ts"]));
        assert_eq!(ends[1]["tid"], device["tid"]);
    }
    let instants = events_named(&trace, "cpu_instant_event");
    assert_eq!(instants[0]["args"]["Bytes"], -64);
    assert_eq!(instants[1]["args"]["id"], 4);
}

#[test]
fn a_recorded_run_is_found_and_read_whole() {
    let recorder = recorder();
    let dir = tempfile::tempdir().expect("temporary folder");
    for rank in 0..2 {
        let folder = dir.path().join(format!("rank_{rank}"));
        std::fs::create_dir(&folder).expect("folder");
        let path = folder.join(format!("worker_{rank}.1700000000000.pt.trace.json.gz"));
        let mut file = std::fs::File::create(path).expect("file");
        kineto::write_compressed(&mut file, &header(rank), &tracks(&recorder)).expect("written");
    }
    let windows = find(&[PathBuf::from(dir.path())], Select::Latest).expect("both ranks");
    assert_eq!(windows[0].files.iter().map(|file| file.rank).collect::<Vec<_>>(), [0, 1]);
    assert!(windows[0].missing.is_empty());

    let trace = open(&windows[0].files[1].path).expect("readable");
    assert_eq!((trace.rank, trace.world_size), (Some(1), Some(2)));
    assert_eq!(trace.base_ns, Some(1_700_000_000_000_000_000));
    assert_eq!(trace.devices, ["a processor"]);
    assert_eq!(trace.run_facts["dropped_events"], "0");
    assert_eq!(trace.run_facts["transport"], "shm");
    assert!(trace.oddities.is_empty(), "{:?}", trace.oddities);

    let [conv, copy, reduce] = trace.kernels[..] else { panic!("{:?}", trace.kernels) };
    assert_eq!(trace.names.text(conv.name), "conv2d_forward");
    assert_eq!(conv.time, TimeRange { start_ns: 1_100, dur_ns: 1_001 });
    assert_eq!((copy.bytes, copy.bandwidth_gb_s), (Some(200), Some(2.0)));
    assert_eq!(reduce.time, TimeRange { start_ns: 2_500, dur_ns: 1_000 });
    assert_ne!(conv.stream, reduce.stream);
    let launched: Vec<_> = trace.launches.iter().map(|launch| launch.correlation).collect();
    assert_eq!(launched, [conv.correlation, copy.correlation, reduce.correlation]);
    let collective = Collective {
        name: "all_reduce".into(),
        in_elems: Some(10),
        out_elems: Some(11),
        dtype: Some("f32".into()),
        group_size: Some(2),
        group: Some("0".into()),
        group_ranks: Some("[0, 1]".into()),
        seq: Some(7),
        wait_ns: Some(201),
        queue_ns: Some(100),
    };
    assert_eq!(trace.collectives, [collective]);
    let annotations: Vec<_> =
        trace.annotations.iter().map(|span| trace.names.text(span.name)).collect();
    assert_eq!(annotations, ["ProfilerStep#3", "forward"]);
    let sample =
        MemorySample { at_ns: 2_600, allocated_bytes: 128, reserved_bytes: 256, device_type: 0 };
    assert_eq!(trace.memory, [sample]);
}

#[test]
fn what_the_writer_says_is_the_error() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::new(io::ErrorKind::StorageFull, "the disk is full"))
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    // The second one has more chunks than wait for the thread that compresses, so that the thread ends while more is written.
    for num_steps in [0, 200_000] {
        let header = Header { steps: vec![(3, span(1_000, 9_000)); num_steps], ..header(1) };
        let error = kineto::write_compressed(&mut Full, &header, &[]).unwrap_err();
        assert_eq!(error.to_string(), "the disk is full");
    }
}
