//! The trace doctor on files: real traces of GPUs, traces that are cut off, MTIA's events, and damaged traces.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use paceline_analysis::doctor::examine;
use paceline_analysis::hta::{Options, analyze};
use paceline_analysis::read::{open, open_beginning, parse};
use paceline_analysis::timeline::Timeline;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn unpacked(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    MultiGzDecoder::new(fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

const CUDA_SHAPED: &str = "cuda_shaped/rank_0/worker_0.1767189312000000000.pt.trace.json.gz";

#[test]
fn real_traces_of_gpus_are_read_and_examined() {
    for (name, causes) in [
        // A step of 16 small kernels, which takes 9 ms: the host launches them one by one.
        ("hta_real/rocm.json.gz", &["host_bound"][..]),
        ("hta_real/event_sync.json.gz", &["host_bound"]),
        // No steps: nothing is advised.
        ("hta_real/alexnet.json.gz", &[]),
    ] {
        let mut timeline = open(&fixture(name)).unwrap();
        timeline.rank.get_or_insert(0);
        let timelines = [timeline];
        analyze(&timelines, &Options::default()).unwrap();
        let diagnosis = examine(&timelines, &Options::default(), None).unwrap().diagnosis;
        let found: Vec<&str> = diagnosis.advice.iter().map(|of| of.cause.key).collect();
        assert_eq!(found, causes, "{name}");
        assert_eq!(diagnosis.unseen.iter().any(|of| of.contains("prof.step()")), causes.is_empty());
    }
}

/// Each cause has the innermost line of the program.
#[test]
fn stacks_name_the_line_of_the_program() {
    let timeline = open(&fixture("torch_stack/train.json.gz")).unwrap();
    let diagnosis = examine(&[timeline], &Options::default(), None).unwrap().diagnosis;
    let found: Vec<(&str, Option<&str>)> =
        diagnosis.advice.iter().map(|of| (of.cause.key, of.evidence.line.as_deref())).collect();
    assert_eq!(found, [("host_work", Some("train.py:5 (<listcomp>)"))]);
    assert!(diagnosis.advice[0].words().contains("; most of it at train.py:5"));
}

/// The doctor leaves runs of paceline to their own advice.
#[test]
fn traces_of_paceline_are_not_examined() {
    let folder = fixture("paceline_2/rank_0");
    let file = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    assert_eq!(examine(&[open(&file).unwrap()], &Options::default(), None), None);
}

#[test]
fn a_trace_that_is_cut_off_keeps_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = unpacked(&fixture(CUDA_SHAPED));
    let packed = fs::read(fixture(CUDA_SHAPED)).unwrap();
    let whole = open(&fixture(CUDA_SHAPED)).unwrap();
    for (name, content) in [
        ("cut.pt.trace.json", &bytes[..bytes.len() * 2 / 3]),
        ("cut.pt.trace.json.gz", &packed[..packed.len() * 2 / 3]),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        open(&path).unwrap_err();
        let timeline = open_beginning(&path).unwrap();
        assert!(
            timeline.oddities.keys().any(|of| of.contains("cut off")),
            "{:?}",
            timeline.oddities
        );
        let kernels = timeline.kernels.len();
        assert!(0 < kernels && kernels < whole.kernels.len(), "{kernels}");
        assert_eq!(timeline.rank, whole.rank);
    }
    // Damage that is no end is an error as before.
    let mut damaged = bytes.clone();
    let middle = bytes.len() / 2;
    damaged.splice(middle..middle, *b"]}]}]}");
    let path = folder.path().join("damaged.pt.trace.json");
    fs::write(&path, damaged).unwrap();
    open_beginning(&path).unwrap_err();
}

/// PyTorch's handler for TensorBoard names a file by host and process.
#[test]
fn the_host_is_in_the_name_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    for (name, host) in [
        ("node_7_4711.1767189312000000000.pt.trace.json", Some("node_7")),
        ("gpu-12.example_9.1767189312000000000.pt.trace.json", Some("gpu-12.example")),
        ("worker_3.1767189312000000000.pt.trace.json", None),
        ("rank_3.1767189312000000000.pt.trace.json", None),
        ("node_7.pt.trace.json", None),
        ("trace.json", None),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, "{\"traceEvents\":[]}").unwrap();
        assert_eq!(open(&path).unwrap().host.as_deref(), host, "{name}");
    }
}

/// HTA counts MTIA's events that have a stream.
#[test]
fn events_of_mtia_are_work_of_their_stream() {
    let event = |args: &str, ts: u32| {
        format!(
            "{{\"ph\":\"X\",\"cat\":\"mtia_ccp_events\",\"name\":\"pe_exe\",\"pid\":9,\"tid\":1,\"ts\":{ts},\"dur\":5,\"args\":{{{args}}}}}"
        )
    };
    let call = "{\"ph\":\"X\",\"cat\":\"mtia_runtime\",\"name\":\"runFunction - job_prep_and_submit_for_execution\",\
         \"pid\":1,\"tid\":1,\"ts\":1,\"dur\":3,\"args\":{\"correlation\":7}}";
    let (with, without) = (event("\"stream\":1,\"correlation\":7", 10), event("", 20));
    let text = format!("{{\"traceEvents\":[{call},{with},{without}]}}");
    let timeline = parse(text.as_bytes()).unwrap();
    assert_eq!((timeline.kernels.len(), timeline.launches.len()), (1, 1));
    assert_eq!(timeline.kernels[0].stream, 1);
    assert_eq!(timeline.skipped["mtia_ccp_events"], 1);
}

/// A fixed sequence of numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % end
    }
}

/// 500 traces with digits, names and structure changed: what can be read can be examined.
#[test]
fn damaged_traces_are_examined_without_a_panic() {
    let originals: Vec<Vec<u8>> =
        [CUDA_SHAPED, "hta_real/rocm.json.gz", "hta_real/event_sync.json.gz"]
            .map(|name| unpacked(&fixture(name)))
            .into();
    let mut numbers = Numbers(7);
    let mut examined = 0;
    for mutant in 0..500 {
        let mut bytes = originals[mutant % originals.len()].clone();
        for _ in 0..1 + numbers.below(20) {
            let at = numbers.below(bytes.len());
            match numbers.below(4) {
                // Only digits become digits, so that most mutants stay JSON.
                0..=2 => {
                    let from = (at..bytes.len()).find(|at| bytes[*at].is_ascii_digit());
                    if let Some(at) = from {
                        bytes[at] = b'0' + numbers.below(10) as u8;
                    }
                }
                _ => {
                    let from = (at..bytes.len()).find(|at| bytes[*at].is_ascii_digit());
                    let long = b"0000000000000000000"[..numbers.below(19)].to_vec();
                    if let Some(at) = from {
                        bytes.splice(at..at, [vec![b'9'], long].concat());
                    }
                }
            }
        }
        if mutant % 10 == 0 {
            bytes.truncate(numbers.below(bytes.len()));
        }
        let Ok(timeline) = parse(&bytes[..]) else { continue };
        examined += usize::from(examine_both(timeline));
    }
    assert!(examined > 300, "{examined}");
}

/// Examines a trace alone, and beside a copy of itself.
fn examine_both(mut timeline: Timeline) -> bool {
    timeline.rank = Some(0);
    let second = Timeline { rank: Some(1), ..timeline.clone() };
    let options = Options { include_last_step: true, ..Options::default() };
    let alone = examine(&[timeline.clone()], &options, Some(1e9));
    examine(&[timeline, second], &options, Some(1e9));
    alone.is_some()
}
