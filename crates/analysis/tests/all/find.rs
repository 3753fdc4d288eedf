//! Trace files: which are found, to which rank they belong, and the messages about those that cannot be read.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use paceline_analysis::TraceError;
use paceline_analysis::read::{Header, Select, Window, find, header, open};

fn trace(rank: usize, world_size: usize) -> String {
    format!(
        "{{\"schemaVersion\": 1, \"distributedInfo\": {{\"backend\": \"gloo\", \"rank\": {rank}, \"world_size\": \
         {world_size}}}, \"traceEvents\": [{}]}}",
        r#"{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1}"#
    )
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).expect("memory takes it");
    encoder.finish().expect("memory takes it")
}

fn put(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("it lies in the folder")).expect("folder");
    fs::write(&path, bytes).expect("file");
    path
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("temporary folder")
}

fn found(place: &Path, select: Select) -> Vec<Window> {
    find(&[place.to_owned()], select).unwrap_or_else(|err| panic!("{err}"))
}

fn refused(places: &[&Path]) -> String {
    let places: Vec<PathBuf> = places.iter().map(|place| place.to_path_buf()).collect();
    find(&places, Select::All).expect_err("it is refused").to_string()
}

/// Rank and time of each file of a window.
fn files(window: &Window) -> Vec<(usize, &str)> {
    window.files.iter().map(|file| (file.rank, file.stamp.as_deref().unwrap_or("-"))).collect()
}

#[test]
fn windows_of_a_run() {
    let dir = folder();
    // Stamps are ordered as numbers: nine digits come before ten.
    for (rank, stamp) in [
        (1, "1000000000"),
        (0, "999999999"),
        (0, "1000000001"),
        (1, "999999998"),
        (0, "1000000002"),
    ] {
        let name = format!("rank_{rank}/worker_{rank}.{stamp}.pt.trace.json.gz");
        put(dir.path(), &name, gzip(&trace(rank, 3)));
    }
    put(dir.path(), "rank_0/notes.json", "no trace");

    let latest = found(dir.path(), Select::Latest);
    assert_eq!(latest.len(), 1);
    assert_eq!(files(&latest[0]), [(0, "1000000002"), (1, "1000000000")]);
    assert_eq!(
        (latest[0].missing.as_slice(), latest[0].stamp.as_deref()),
        (&[2][..], Some("1000000002"))
    );
    assert_eq!(latest[0].files[0].world_size, Some(3));

    let all = found(dir.path(), Select::All);
    let stamps: Vec<_> = all.iter().map(|window| (files(window), window.missing.len())).collect();
    assert_eq!(
        stamps,
        [
            (vec![(0, "999999999"), (1, "999999998")], 1),
            (vec![(0, "1000000001"), (1, "1000000000")], 1),
            (vec![(0, "1000000002")], 2)
        ]
    );
}

#[test]
fn runs_with_different_numbers_of_ranks_share_no_window() {
    let dir = folder();
    let put_run = |stamp: u64, world_size: usize| {
        for rank in 0..world_size {
            let name = format!("rank_{rank}/worker_{rank}.{stamp}{rank}.pt.trace.json");
            put(dir.path(), &name, trace(rank, world_size));
        }
    };
    put_run(10, 2);
    put_run(20, 3);
    put_run(30, 2);
    let latest = found(dir.path(), Select::Latest);
    assert_eq!(files(&latest[0]), [(0, "300"), (1, "301")]);
    assert!(latest[0].missing.is_empty());
    let all = found(dir.path(), Select::All);
    let worlds: Vec<_> = all.iter().map(|w| (w.stamp.as_deref(), w.files.len())).collect();
    assert_eq!(worlds, [(Some("100"), 2), (Some("200"), 3), (Some("300"), 2)]);
}

#[test]
fn traces_of_different_runs_share_no_window() {
    let dir = folder();
    let put_run = |run: &str, stamp: u64, ranks: &[usize]| {
        for &rank in ranks {
            let text =
                trace(rank, 2).replace("\"rank\"", &format!("\"run_id\": \"{run}\", \"rank\""));
            put(
                dir.path(),
                &format!("rank_{rank}/worker_{rank}.{stamp}{rank}.pt.trace.json"),
                text,
            );
        }
    };
    // Rank 1 has left no trace of the newest run, and its trace of an older run does not take its place.
    put_run("b", 10, &[0, 1]);
    put_run("a", 20, &[0]);
    let latest = found(dir.path(), Select::Latest);
    assert_eq!((files(&latest[0]), &latest[0].missing[..]), (vec![(0, "200")], &[1][..]));
    let all = found(dir.path(), Select::All);
    let sizes: Vec<_> = all.iter().map(|w| (w.stamp.as_deref(), w.files.len())).collect();
    assert_eq!(sizes, [(Some("100"), 2), (Some("200"), 1)]);
    // The latest window of a run that profiled twice has the newest trace of each rank.
    put_run("b", 30, &[0, 1]);
    let latest = found(dir.path(), Select::Latest);
    assert_eq!(files(&latest[0]), [(0, "300"), (1, "301")]);
}

#[test]
fn numbers_that_no_run_can_have_are_refused_or_doubted() {
    for claim in ["\"rank\": -1", "\"rank\": 18446744073709551615", "\"rank\": \"two\""] {
        let dir = folder();
        let text = trace(0, 2).replace("\"rank\": 0", claim);
        let path = put(dir.path(), "rank_0/worker_0.1.pt.trace.json", text);
        let message = refused(&[dir.path()]);
        assert!(message.starts_with(&format!("{} claims a rank of ", path.display())), "{message}");
    }
    for world_size in [0, 2] {
        let dir = folder();
        put(dir.path(), "rank_5/worker_5.1.pt.trace.json", trace(5, world_size));
        let window = found(dir.path(), Select::Latest).remove(0);
        let [doubt] = &window.doubts[..] else { panic!("{:?}", window.doubts) };
        let expected = format!("claims to be of rank 5 in a world of {world_size}.");
        assert!(doubt.ends_with(&expected), "{doubt}");
    }
}

#[test]
fn ranks_come_from_the_file_else_from_the_path() {
    let dir = folder();
    let plain = "{\"traceEvents\": []}";
    put(dir.path(), "rank_5/worker_9.1.pt.trace.json", trace(2, 4));
    put(dir.path(), "rank_7/host.1.pt.trace.json", plain);
    put(dir.path(), "worker_1.1.pt.trace.json", plain);
    put(dir.path(), "rank_0.pt.trace.json", "[]");
    let [window] = &found(dir.path(), Select::All)[..] else { panic!("one window") };
    assert_eq!(files(window), [(0, "-"), (1, "1"), (2, "1"), (7, "1")]);
    assert_eq!(window.missing, [3]);
    let [doubt] = &window.doubts[..] else { panic!("{:?}", window.doubts) };
    assert!(doubt.ends_with("is of rank 2 by what it says, and of rank 5 by its path."), "{doubt}");
    assert_eq!(open(&dir.path().join("worker_1.1.pt.trace.json")).expect("readable").rank, Some(1));
}

#[test]
fn files_are_taken_whatever_their_names() {
    let dir = folder();
    let a = put(dir.path(), "a.json", trace(1, 2));
    let b = put(dir.path(), "b.json.gz", gzip(&trace(0, 2)));
    let windows = find(&[a.clone(), b.clone()], Select::All).expect("two files");
    assert_eq!(files(&windows[0]), [(0, "-"), (1, "-")]);
    assert_eq!(open(&b).expect("readable").kernels.len(), 1);
    assert_eq!(open(&a).expect("readable").source, a.display().to_string());
    // The content decides whether a file counts as compressed, not its name.
    let c = put(dir.path(), "c.json", gzip(&trace(1, 2)));
    assert_eq!(open(&c).expect("readable").rank, Some(1));
    assert_eq!(
        refused(&[&a, &b, &c]),
        format!(
            "{} and {} are both of rank 1, in the same profiling window; give one of them",
            a.display(),
            c.display()
        )
    );
}

#[test]
fn what_cannot_be_found_is_said() {
    let dir = folder();
    let place = dir.path().to_owned();
    fs::create_dir(place.join("rank_0")).expect("folder");
    assert_eq!(
        refused(&[&place]),
        format!(
            "No trace files found. (Looked in {} for files that end in .json or .json.gz and hold \"traceEvents\".)",
            place.display()
        )
    );
    let nobody = put(&place, "host_17.pt.trace.json", "{\"traceEvents\": []}");
    assert_eq!(found(&place, Select::All)[0].files[0].rank, 0);
    put(&place, "host_18.pt.trace.json", "{\"traceEvents\": []}");
    let message = refused(&[&place]);
    assert!(
        message.starts_with(&format!("{} does not say which rank", nobody.display())),
        "{message}"
    );
    assert!(message.contains("rank_<n>"), "{message}");
    let gone = place.join("gone.json");
    assert_eq!(
        refused(&[&gone]),
        format!("{}: No such file or directory (os error 2)", gone.display())
    );
    assert!(matches!(open(&place), Err(TraceError::Io { .. })));
}

#[test]
fn several_runs_and_copies_are_no_windows() {
    let dir = folder();
    put(dir.path(), "ddp/rank_0/worker_0.1.pt.trace.json", trace(0, 1));
    put(dir.path(), "hook/rank_0/worker_0.2.pt.trace.json", trace(0, 1));
    let message = refused(&[dir.path()]);
    assert!(message.contains("look like two runs") && message.contains("hook"), "{message}");

    let dir = folder();
    put(dir.path(), "rank_0/worker_0.1.pt.trace.json", trace(0, 1));
    put(dir.path(), "rank_0/worker_0.1.pt.trace.json.gz", gzip(&trace(0, 1)));
    let message = refused(&[dir.path()]);
    assert!(message.contains("are both of rank 0"), "{message}");
}

#[test]
fn broken_files_are_named() {
    let dir = folder();
    // Random letters, so that the compressed file is long enough to be cut in all these places.
    let noise: String = (0..40_000u32)
        .map(|i| char::from(b'a' + (i.wrapping_mul(2_654_435_761) >> 27) as u8 % 26))
        .collect();
    let text = trace(0, 1).replace("\"k\"", &format!("\"{noise}\""));
    let packed = gzip(&text);
    for cut in [1, 2, 5, 12, 500, packed.len() - 9, packed.len() - 8, packed.len() - 1] {
        let path = put(dir.path(), "cut.json.gz", &packed[..cut]);
        let message = open(&path).expect_err("it is cut").to_string();
        let expected = if cut == 1 {
            " is named .gz, but is no gzip file"
        } else {
            ": the gzip file is cut off, after "
        };
        assert!(message.starts_with(&format!("{}{expected}", path.display())), "{cut}: {message}");
    }
    let mut damaged = packed.clone();
    damaged[packed.len() - 6] ^= 1;
    let path = put(dir.path(), "damaged.json.gz", &damaged);
    let message = open(&path).expect_err("it is damaged").to_string();
    assert!(message.contains(": the gzip file is damaged, after "), "{message}");

    let path = put(dir.path(), "broken.json.gz", gzip(&text[..text.len() - 2]));
    let message = open(&path).expect_err("it is broken").to_string();
    assert_eq!(
        message,
        format!(
            "{}: at byte {} of the JSON: expected ',' or ']', found the end of the file",
            path.display(),
            text.len() - 2
        )
    );
    let path = put(dir.path(), "empty.json", "");
    let message = open(&path).expect_err("it is empty").to_string();
    assert_eq!(message, format!("{} is empty", path.display()));
    let path = put(dir.path(), "text.json.gz", "hello");
    let message = open(&path).expect_err("it is neither").to_string();
    assert!(
        message.contains("text.json.gz is named .gz, but is no gzip file, nor JSON"),
        "{message}"
    );
}

#[test]
fn a_header_is_read_without_the_events() {
    let dir = folder();
    // Broken after the header, where nobody looks.
    let start = "{\"schemaVersion\": 1, \"distributedInfo\": {\"backend\": \"nccl\", \"rank\": 4, \"world_size\": 8}";
    let path = put(dir.path(), "a.json", start);
    let backend = Some("nccl".into());
    let expected = Header { rank: Some(4), world_size: Some(8), backend, ..Header::default() };
    assert_eq!(header(&path).expect("the header is whole"), expected);
    let many = format!("{start}, \"traceEvents\": [{}", "{\"ph\": \"X\"},".repeat(1 << 20));
    let path = put(dir.path(), "b.json.gz", gzip(&many));
    assert_eq!(header(&path).expect("the header is whole"), expected);
    let path = put(
        dir.path(),
        "c.json",
        "{\"traceEvents\": [{\"name\": \"x\"}], \"distributedInfo\": {\"rank\": 1}}",
    );
    assert_eq!(header(&path).expect("it comes last").rank, Some(1));
    let path = put(dir.path(), "d.json", "[{}]");
    assert_eq!(header(&path).expect("it has none"), Header::default());
}

/// A file that PyTorch's handler has written, with a schedule without `repeat`.
fn scheduled(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/torch_schedule");
    fs::read_to_string(folder.join(name)).expect("the fixture is there")
}

#[test]
fn last_traces_without_work_are_left_out() {
    let dir = folder();
    for rank in 0..2 {
        put(
            dir.path(),
            &format!("host_{rank}.100.pt.trace.json"),
            scheduled(&format!("work_{rank}.json")),
        );
        put(
            dir.path(),
            &format!("host_{rank}.200.pt.trace.json"),
            scheduled(&format!("last_{rank}.json")),
        );
    }
    for select in [Select::Latest, Select::All] {
        let windows = found(dir.path(), select);
        assert_eq!(windows.len(), 1);
        assert_eq!(files(&windows[0]), [(0, "100"), (1, "100")]);
        let left_out = [0, 1].map(|rank| dir.path().join(format!("host_{rank}.200.pt.trace.json")));
        assert_eq!(windows[0].left_out, left_out);
    }
    // A later trace with work is the latest again, and an empty one between others stays where it is.
    for rank in 0..2 {
        put(
            dir.path(),
            &format!("host_{rank}.300.pt.trace.json"),
            scheduled(&format!("work_{rank}.json")),
        );
    }
    let windows = found(dir.path(), Select::Latest);
    assert_eq!(files(&windows[0]), [(0, "300"), (1, "300")]);
    assert!(windows[0].left_out.is_empty());
}

#[test]
fn empty_traces_are_shown_if_there_is_nothing_else() {
    let dir = folder();
    for stamp in ["100", "200"] {
        put(dir.path(), &format!("host_0.{stamp}.pt.trace.json"), scheduled("last_0.json"));
    }
    let windows = found(dir.path(), Select::Latest);
    assert_eq!(files(&windows[0]), [(0, "200")]);
    assert!(windows[0].left_out.is_empty());
}

#[test]
fn files_of_other_programs_are_named() {
    let dir = folder();
    let tar =
        [b"rank_0.json".to_vec(), vec![0; 246], b"ustar\x0000".to_vec(), vec![0; 249]].concat();
    let nodes = r#"{"schema": "1.1.0-chakra.0.0.4", "pid": 1, "nodes": [{"id": 1}]}"#;
    let cases: [(&str, &[u8], &str); 19] = [
        ("a.json", b"\x80\x04\x95", "a Python pickle"),
        ("q.json.gz", &gzip("<!DOCTYPE html>"), "a page"),
        ("r.json.gz", &gzip(&String::from_utf8_lossy(&tar)), "an archive (tar)"),
        ("b.json", b"PK\x03\x04\x14", "an archive (zip)"),
        ("c.tar", &tar, "an archive (tar): unpack it"),
        ("e.sqlite", b"SQLite format 3\0", "Nsight Systems"),
        ("f.nsys-rep", b"\x01\x02\x03", "a report of Nsight Systems: record with torch.profiler"),
        ("g.xplane.pb", b"\n\x20", "XPlane"),
        ("h.html", b"<!DOCTYPE html>", "a page"),
        ("i.json.zst", b"\x28\xb5\x2f\xfd\x04", "compressed by zstd"),
        ("j.json", b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("k.csv", b"Name,Calls", "rocprof"),
        ("l.json", nodes.as_bytes(), "an execution trace of PyTorch or Chakra"),
        ("m.json", br#"{"rocprofiler-sdk-tool": [{}]}"#, "rocprofv3"),
        ("o.json", br#"{"schema": "1.1.1", "nodes": [{"id": 1"#, "an execution trace of PyTorch"),
        ("s.json", b"\x04\x22\x4d\x18", "is binary"),
        ("t.json", b"{\"a\": 1}\n{\"a\": 2}", "no \"traceEvents\""),
        ("p.json", b"\xff\xfe{\0", "text in UTF-16: pass the file as"),
        ("n.json", br#"{"mod\u001b[2Jel": {"name": "x"}}"#, "el\", and no \"traceEvents\""),
    ];
    for (name, bytes, words) in cases {
        let path = put(dir.path(), name, bytes);
        let error =
            header(&path).err().or_else(|| open(&path).err()).expect("no trace").to_string();
        assert!(error.contains(name) && error.contains(words), "{error}");
        assert!(!error.contains('\x1b'), "{error}");
    }
    // A folder without traces says what lies there.
    let only = folder();
    put(only.path(), "run.nsys-rep", b"\x01");
    let error = refused(&[only.path()]);
    assert!(
        error.contains("No trace files found") && error.contains("run.nsys-rep is a report"),
        "{error}"
    );
    // An empty list of events is a trace, and broken JSON still names the byte.
    open(&put(dir.path(), "empty.json", "\u{feff}{\"traceEvents\": []}")).unwrap();
    let error =
        open(&put(dir.path(), "broken.json", "{\"traceEvents\": [}")).unwrap_err().to_string();
    assert!(error.contains("at byte 17"), "{error}");
}

#[test]
fn traces_of_several_ranks_in_one_file_are_refused() {
    let dir = folder();
    let step = |pid: u32, category: &str, number: u32| {
        format!(
            "{{\"ph\":\"X\",\"cat\":\"{category}\",\"name\":\"ProfilerStep#{number}\",\"pid\":{pid},\"tid\":1,\"ts\":1,\"dur\":9}}"
        )
    };
    let file =
        |name: &str, steps: &[String]| put(dir.path(), name, format!("[{}]", steps.join(",")));
    let merged =
        file("merged.json", &[step(7, "user_annotation", 1), step(9, "user_annotation", 1)]);
    let error = open(&merged).unwrap_err().to_string();
    assert!(error.contains("steps of several processes") && error.contains("own files"), "{error}");
    // Two programs that mark no steps.
    let of_loop = |pid: u32| {
        step(pid, "user_annotation", 1).replace("ProfilerStep#1", "Optimizer.step#SGD.step")
    };
    let error = open(&file("loops.json", &[of_loop(7), of_loop(9)])).unwrap_err().to_string();
    assert!(error.contains("steps of several processes"), "{error}");
    open(&file("loop.json", &[of_loop(7), of_loop(7)])).unwrap();
    // Processes of one number, as in containers.
    let same = [1, 2].map(|number| step(7, "user_annotation", number));
    let error = open(&file("same.json", &same)).unwrap_err().to_string();
    assert!(error.contains("steps that overlap"), "{error}");
    // The device's view of a step is of another process.
    open(&file("one.json", &[step(7, "user_annotation", 1), step(0, "gpu_user_annotation", 1)]))
        .unwrap();
}
