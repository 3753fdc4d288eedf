//! The properties that must hold for any bytes in a checkpoint or in a configuration file.
//!
//! Input: bytes. Output: whether they are accepted, and otherwise the message. A panic is a fault of the reader. The
//! fuzzer and the replay of its kept inputs (`crates/paceline/tests/corpus.rs`) call this.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use paceline::checkpoint::index::{CHUNK_BYTES, INDEX, Index, ShardFile, sha256};
use paceline::checkpoint::pieces::{self, Piece, Ranges};
use paceline::checkpoint::{self, Checkpoint, RankOfRun, Setting};
use paceline::memory::{Allocator, DType};
use paceline::model::fuzzing::{ADAM_W, small_layout};
use paceline::model::{Optimizer, Storage};
use paceline::run::resolve::resolve_inputs;
use paceline::settings::spec::RunSpec;
use paceline::settings::spec_file::SpecFile;

/// Reads the bytes as a checkpoint of a small model, as they are and with the right digests: the index in one line, then
/// the files, one after the other. An accepted checkpoint is the same when it is written again.
pub fn checkpoint(bytes: &[u8]) -> Result<(), String> {
    let outcome = read_checkpoint(bytes);
    if let Some(signed) = signed(bytes) {
        let again = read_checkpoint(&signed);
        assert!(outcome.is_err() || again == Ok(()), "{again:?} with the digests that it has");
    }
    outcome
}

/// The line of the index, and the bytes of all files.
fn parts(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, &[]),
    }
}

/// Cuts the bytes of all files into files. The last one gets the rest.
fn cut<'a>(index: &Index, mut rest: &'a [u8]) -> Vec<&'a [u8]> {
    let mut files = Vec::new();
    for (at, file) in index.files.iter().enumerate() {
        let is_last = at + 1 == index.files.len();
        let len = usize::try_from(file.num_bytes).unwrap_or(usize::MAX).min(rest.len());
        let (own, others) = rest.split_at(if is_last { rest.len() } else { len });
        files.push(own);
        rest = others;
    }
    files
}

/// The same checkpoint with the digests that its bytes have, if there is an index.
fn signed(bytes: &[u8]) -> Option<Vec<u8>> {
    let (index, rest) = parts(bytes);
    let mut signed: serde_json::Value = serde_json::from_slice(index).ok()?;
    let mut index: Index = serde_json::from_value(signed.get_mut("index")?.take()).ok()?;
    let files = cut(&index, rest);
    for (file, bytes) in index.files.iter_mut().zip(files) {
        file.chunks = bytes.chunks(CHUNK_BYTES).map(sha256).collect();
    }
    Some([&index.to_json(), rest].concat())
}

fn read_checkpoint(bytes: &[u8]) -> Result<(), String> {
    let name = format!("paceline-{}-{:?}", std::process::id(), std::thread::current().id());
    let folder = std::env::temp_dir().join(name);
    fs::create_dir_all(&folder).expect("a folder");
    let outcome = read_in(&folder, bytes);
    let _ = fs::remove_dir_all(&folder);
    outcome
}

fn read_in(folder: &Path, bytes: &[u8]) -> Result<(), String> {
    let open = |bytes: &[u8]| {
        let (index, rest) = parts(bytes);
        let parsed = Index::parse(index).map_err(|reason| format!("the index {reason}"))?;
        fs::write(folder.join(INDEX), index).expect("a file");
        for (file, bytes) in parsed.files.iter().zip(cut(&parsed, rest)) {
            fs::write(folder.join(&file.name), bytes).expect("a file");
        }
        Checkpoint::open_at(folder)
    };
    let opened = open(bytes).map_err(sentence)?;
    let settings = [Setting::of_flag("--seed", 42, "the samples would come in another order")];
    let layout = Arc::new(small_layout());
    let allocator = Allocator::new();
    let storage = Storage::private(layout.clone(), DType::F32, &allocator).expect("a small model");
    let mut optimizer = Optimizer::new(ADAM_W, &storage, &allocator).expect("a small model");
    let progress = opened.progress();
    progress.last_epoch();
    opened.check(&layout, &ADAM_W, &settings).map_err(sentence)?;
    let all = Ranges::everything(&layout);
    let (rank, world_size, strategy) = (0, 1, "any of the exact ones");
    opened.dropped(world_size, strategy);
    let place = RankOfRun { rank, world_size, strategy };
    let restored = opened.restore(place, &all, &storage, &mut optimizer, Vec::new());
    restored.map_err(|failure| sentence(failure.to_string()))?;

    let steps = optimizer.steps();
    let mut index = checkpoint::head(world_size, strategy, &settings, steps, &progress);
    let mut pieces = pieces::of_ranges("", &all, &storage, &optimizer).expect("a whole model");
    pieces.extend(pieces::of_buffers(&storage, |_| true).expect("a whole model"));
    let read = |piece: &Piece| piece.data.as_bytes().read::<u8>().expect("nobody writes").to_vec();
    let file: Vec<u8> = pieces.iter().flat_map(read).collect();
    index.tensors = checkpoint::entries(&pieces, 0);
    index.files.push(ShardFile {
        name: "rank-000-of-001.shard".into(),
        num_bytes: file.len() as u64,
        chunks: file.chunks(CHUNK_BYTES).map(sha256).collect(),
    });
    let again = open(&[index.to_json(), file].concat()).expect("what was written can be read");
    again.check(&layout, &ADAM_W, &settings).expect("the same model");
    // Compared as text, because a loss may be NaN.
    assert_eq!(format!("{:?}", again.progress()), format!("{progress:?}"));
    assert_eq!(steps, again.optimizer_steps);
    Ok(())
}

/// Reads the bytes as a configuration in TOML and in JSON. An accepted configuration is the same when it is written
/// again, states nothing but its keys, and resolves like the `config.json` of its own run.
pub fn configuration(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let as_toml = parse("file.toml", text);
    // The other reader has no integers beyond i64, which a seed may be.
    if let (Ok(spec), Ok(table)) = (&as_toml, text.parse()) {
        has_numbers_of(spec, &table);
    }
    match (as_toml, parse("file.json", text)) {
        (Ok(spec), _) | (_, Ok(spec)) => is_sound(&spec),
        (Err(as_toml), Err(as_json)) => {
            let is_json = text.trim_start().starts_with('{');
            Err(if is_json { as_json } else { as_toml })
        }
    }
}

fn parse(name: &str, text: &str) -> Result<RunSpec, String> {
    let file = SpecFile::parse(Path::new(name), text);
    file.map(|file| file.spec).map_err(|error| sentence(error.to_string()))
}

fn is_sound(spec: &RunSpec) -> Result<(), String> {
    let matches = spec.parse().expect("a file is accepted only if its keys go together");
    assert_eq!(RunSpec::typed(&matches).expect("texts"), *spec, "flags that nobody has stated");
    let table = spec.to_json();
    let json = serde_json::to_string(&table).expect("plain data");
    assert_eq!(parse("again.json", &json).as_ref(), Ok(spec));
    // TOML has no numbers beyond i64.
    if let Ok(toml) = toml::to_string(&table) {
        assert_eq!(parse("again.toml", &toml).as_ref(), Ok(spec), "{toml}");
    }
    let resolved = |spec: &RunSpec| match resolve_inputs(spec, None) {
        Ok((config, _)) => Ok(config.to_json()),
        Err(error) => Err(sentence(error.to_string())),
    };
    let config = resolved(&affordable(spec))?;
    let stated = parse("config.json", &config.to_string()).expect("the file of a run folder");
    assert_eq!(resolved(&stated).as_ref(), Ok(&config));
    Ok(())
}

/// Checks the digits of the numbers in a specification against the numbers of the crate that reads TOML.
fn has_numbers_of(spec: &RunSpec, table: &toml::Table) {
    for (key, value) in table.iter().filter(|(key, _)| *key != "version") {
        let stated = spec.get(&key.replace('_', "-")).and_then(<[String]>::first);
        match (value, stated) {
            (toml::Value::Integer(number), Some(digits)) => {
                // JSON has a zero with a sign, and TOML does not.
                let is_zero = *number == 0 && digits.parse() == Ok(0.0);
                assert!(is_zero || digits.parse() == Ok(*number), "{key} = {number} is {digits}");
            }
            (toml::Value::Float(number), Some(digits)) => {
                let same = |digits: f64| digits == *number || digits.is_nan() && number.is_nan();
                assert!(digits.parse().is_ok_and(same), "{key} = {number} is {digits}");
            }
            _ => {}
        }
    }
}

/// The specification without settings that would read files, use the network, or take long.
fn affordable(spec: &RunSpec) -> RunSpec {
    let spec = spec.without(&["data", "data-dir", "download", "mirror", "resume"]);
    let is_large = |values: &[String]| {
        values.iter().any(|value| value.parse::<u64>().is_ok_and(|extent| extent > 32))
    };
    let spec = match spec.get("image") {
        Some(extents) if is_large(extents) => spec.without(&["image"]),
        _ => spec,
    };
    let makes_images = spec.get("model").is_none_or(|model| model == ["cnn"]);
    let samples = spec.number("samples");
    if makes_images && samples.is_none_or(|samples| samples > 64) {
        return spec.with("samples", 8);
    }
    spec
}

fn sentence(message: String) -> String {
    assert!(message.contains(' '), "a message is a sentence: {message}");
    message
}
