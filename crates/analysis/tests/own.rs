//! What our recorder writes is what our reader reads.

use std::path::PathBuf;

use paceline_analysis::kineto::{self, Header, RanOn};
use paceline_analysis::read::{Select, find, open};
use paceline_analysis::timeline::{Collective, MemorySample, TimeRange};
use paceline_trace::{Event, Operation, OperationTimes, Place, Recorder, Shapes, Span, Track};

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
    }
}

#[test]
fn a_recorded_run_is_found_and_read_whole() {
    let mut recorder = Recorder::new();
    let main = recorder.track("main", 100);
    recorder.set_on(true);
    main.record(Event::Span { name: "forward", span: span(1_000, 3_000) });
    let shapes = Shapes::new([&[64, 28][..], &[3]]);
    main.record(Event::Kernel {
        name: "conv2d_forward",
        launched: Span::at(1_100),
        span: span(1_100, 2_101),
        shapes,
    });
    main.record(Event::Copy {
        launched: Span::at(2_200),
        span: span(2_200, 2_300),
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
            submitted_ns: 2_400,
            started_ns: 2_500,
            present_ns: 2_701,
            finished_ns: 3_500,
        },
    }));
    main.record(Event::Memory {
        at_ns: 2_600,
        category: "activations",
        delta_bytes: -64,
        allocated_bytes: 128,
        reserved_bytes: 256,
        address: 4096,
    });
    let tracks: Vec<&Track> = recorder.tracks().iter().map(AsRef::as_ref).collect();

    let dir = tempfile::tempdir().expect("temporary folder");
    for rank in 0..2 {
        let folder = dir.path().join(format!("rank_{rank}"));
        std::fs::create_dir(&folder).expect("folder");
        let path = folder.join(format!("worker_{rank}.1700000000000.pt.trace.json.gz"));
        let mut file = std::fs::File::create(path).expect("file");
        kineto::write_compressed(&mut file, &header(rank), &tracks).expect("written");
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
    let sample = MemorySample {
        at_ns: 2_600,
        allocated_bytes: 128,
        reserved_bytes: 256,
        device_type: 0,
        delta_bytes: -64,
    };
    assert_eq!(trace.memory, [sample]);
}
