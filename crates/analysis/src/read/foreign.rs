//! Files of other programs that are no traces of PyTorch's profiler: what each is, and what to do with it.
//!
//! A path goes in. A sentence without its subject comes out. Only the beginning of a file is looked at.

use std::io::Read;
use std::path::Path;

use paceline_files::printable;

use flate2::read::MultiGzDecoder;

use super::file::{GZIP_MAGIC, with_json};
use crate::json::{JsonError, Pull, lossy};

const SNAPSHOT: &str =
    "a snapshot of a card's memory needs a name that ends in .pickle, and is analyzed alone";
const RECORD: &str = "record with torch.profiler and pass its trace (.json or .json.gz)";
const PLAIN: &str = "pass the file as torch.profiler has written it (UTF-8)";
const UNPACK: &str = "unpack it, and pass the trace in it";

/// Files by the end of their name: the kind, and the remedy.
const NAMES: [(&str, &str, &str); 6] = [
    (".nsys-rep", "a report of Nsight Systems", RECORD),
    (".ncu-rep", "a report of Nsight Compute", RECORD),
    (".xplane.pb", "a profile of TensorFlow or JAX (XPlane)", RECORD),
    (".pftrace", "a trace of Perfetto or rocprofv3 in binary form", RECORD),
    (".perfetto-trace", "a trace of Perfetto in binary form", RECORD),
    (".csv", "a table (CSV), as rocprof and nsys stats write it", RECORD),
];

/// Files by their bytes at a place.
const BYTES: [(usize, &[u8], &str, &str); 10] = [
    (
        0,
        b"SQLite format 3",
        "a database (SQLite) of Nsight Systems, rocprofv3 or rocmProfileData",
        RECORD,
    ),
    (0, b"PK", "an archive (zip), or a file of torch.save", UNPACK),
    (257, b"ustar", "an archive (tar)", UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", UNPACK),
    (0, b"\xfd7zXZ", "compressed by xz", UNPACK),
    (0, b"BZh", "compressed by bzip2", UNPACK),
    (0, b"\xff\xfe", "text in UTF-16", PLAIN),
    (0, b"\xfe\xff", "text in UTF-16", PLAIN),
    (0, b"<", "a page (HTML or XML)", RECORD),
    (0, b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself (git lfs pull)"),
];

/// JSON objects by a key of theirs.
const KEYS: [(&str, &str, &str); 8] = [
    (
        "nodes",
        "an execution trace of PyTorch or Chakra, which has no times of kernels",
        "pass the trace that torch.profiler writes of the same run",
    ),
    ("rocprofiler-sdk-tool", "a result of rocprofv3", RECORD),
    ("planes", "a profile of TensorFlow or JAX (XPlane)", RECORD),
    ("segments", "a snapshot of PyTorch's memory", RECORD),
    ("device_traces", "a snapshot of PyTorch's memory", RECORD),
    ("pg_config", "a dump of PyTorch's flight recorder", RECORD),
    ("resourceSpans", "a trace of OpenTelemetry", RECORD),
    ("shared", "a profile of speedscope", RECORD),
];

/// The beginning of a file that is looked at.
const START_BYTES: u64 = 512;
/// The most keys of an object that are looked at, and the most that are named.
const MOST_KEYS: usize = 64;
const NAMED_KEYS: usize = 4;

/// The kind of a file that cannot be read as JSON; `None` if nothing says it.
pub(super) fn of_bytes(path: &Path) -> Option<String> {
    let mut start = Vec::new();
    let file = || paceline_files::open(path).ok();
    file()?.take(START_BYTES).read_to_end(&mut start).ok()?;
    if start.starts_with(&GZIP_MAGIC) {
        // What comes before a fault of the packed bytes says enough.
        start.clear();
        let _ = MultiGzDecoder::new(file()?).take(START_BYTES).read_to_end(&mut start);
    }
    let is_there =
        |at: usize, bytes: &[u8]| start.get(at..).is_some_and(|of| of.starts_with(bytes));
    let is_pickle = matches!(start[..], [0x80, 2..=5, ..]);
    let pickle = is_pickle.then_some(("a Python pickle", SNAPSHOT));
    let by_bytes = BYTES.iter().find(|of| is_there(of.0, of.1)).map(|of| (of.2, of.3));
    let name = path.to_string_lossy().to_ascii_lowercase();
    let by_name = || NAMES.iter().find(|of| name.ends_with(of.0)).map(|of| (of.1, of.2));
    let is_control = |of: &u8| *of < GZIP_MAGIC[0] && !of.is_ascii_whitespace();
    let binary = start.iter().any(is_control).then_some(("binary, and no JSON", RECORD));
    let (what, remedy) = pickle.or(by_bytes).or_else(by_name).or(binary)?;
    Some(format!("is {what}: {remedy}"))
}

/// The kind of a JSON file without events; `None` if it has a list of events, or nothing at all. Of a file that is cut off or
/// damaged, only if a key is known.
pub(super) fn of_keys(path: &Path) -> Option<String> {
    let mut keys = Vec::new();
    let read = |input: &mut dyn Read| Ok(read_keys(&mut Pull::new(input), &mut keys).is_ok());
    let is_whole = with_json(path, read).ok()?;
    if keys.is_empty() || keys.iter().any(|key| key == "traceEvents") {
        return None;
    }
    let known = KEYS.iter().find(|of| keys.iter().any(|key| key == of.0));
    if let Some((_, what, remedy)) = known {
        return Some(format!("is {what}: {remedy}"));
    }
    if !is_whole {
        return None;
    }
    let named = keys.iter().take(NAMED_KEYS).map(|key| format!("\"{}\"", printable(key)));
    let named: Vec<String> = named.collect();
    let named = named.join(", ");
    Some(format!("has {named}, and no \"traceEvents\", so it is no trace: {RECORD}"))
}

/// Adds the keys of an object; none of a list.
fn read_keys<R: Read>(pull: &mut Pull<R>, keys: &mut Vec<String>) -> Result<(), JsonError> {
    if pull.at_array()? {
        return Ok(());
    }
    pull.begin_object()?;
    while let Some(key) = pull.next_key()? {
        keys.push(lossy(key).chars().take(40).collect());
        if keys.len() == MOST_KEYS {
            break;
        }
        pull.skip()?;
    }
    Ok(())
}
