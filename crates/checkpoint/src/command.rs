//! `paceline checkpoint`: shows, verifies and exports checkpoints.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use paceline_data::text::Tokenizer;
use paceline_failure::outputs::{check_file, check_folder, make_folder, write_stated};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say, thousands};
use paceline_model::pretrained::CONFIG_FILE;
use paceline_table::fitted::fitted;
use paceline_table::table::grouped;

use super::export::{export, export_parameters};
use super::hugging_face::{HuggingFace, TOKENIZER};
use super::opened::{Checkpoint, find};
use super::reader::Reader;
use super::steps;
use super::verify::{problems_of_folder, verify};
use crate::args::{CheckpointCommand, ExportArgs};

/// The tokenizer of a data set that the program carries, by the name of the data set.
pub type Carried = fn(&str) -> Option<&'static str>;

/// Runs `paceline checkpoint`. Returns the exit code.
pub fn checkpoint(command: &CheckpointCommand, carried: Carried) -> Result<u8> {
    match command {
        CheckpointCommand::Show(args) => {
            say(&shown(&Checkpoint::open(&args.folder).map_err(Failure::Usage)?, &args.folder));
            Ok(0)
        }
        CheckpointCommand::Verify(args) => verify_all(&args.folder),
        CheckpointCommand::Export(args) => export_to(args, carried),
    }
}

/// A checkpoint in words: where it stands, its tensors and the settings of its run.
fn shown(checkpoint: &Checkpoint, folder: &Path) -> String {
    let index = checkpoint.index();
    let progress = checkpoint.progress();
    let num_bytes: u64 = index.files.iter().map(|file| file.num_bytes).sum();
    let others: Vec<String> = steps::all(folder)
        .into_iter()
        .map(steps::name)
        .filter(|n| *n != checkpoint.name())
        .collect();
    let mut facts = vec![
        ("Checkpoint", checkpoint.path().printable().to_string()),
        ("Step", thousands(progress.steps)),
        (
            "Epoch",
            format!(
                "{} complete, and {} of the next",
                thousands(progress.position.epoch),
                plural(progress.position.batch, "batch")
            ),
        ),
        ("Samples", thousands(progress.samples)),
        ("Written by", plural(index.world_size, "rank")),
        ("Strategy", index.strategy.clone()),
        ("Size", megabytes(num_bytes)),
        ("Digest", format!("sha256 {}", checkpoint.digest())),
    ];
    if !others.is_empty() {
        facts.push(("Also there", others.join(", ")));
    }
    facts.extend(index.previous.as_ref().map(|it| ("Follows", steps::name(it.steps))));
    facts.extend(steps::good(folder).map(|steps| ("Last good", steps::name(steps))));
    let mut text = String::new();
    for (name, value) in facts {
        let _ = writeln!(text, "{name:<12}{value}");
    }
    let files: Vec<[String; 3]> = index
        .files
        .iter()
        .enumerate()
        .map(|(rank, file)| [file.name.clone(), rank.to_string(), megabytes(file.num_bytes)])
        .collect();
    let tensors: Vec<[String; 5]> = index
        .tensors
        .iter()
        .map(|(name, tensor)| {
            let mut ranks: Vec<usize> = tensor.pieces.iter().map(|piece| piece.file).collect();
            ranks.sort_unstable();
            ranks.dedup();
            let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
            [
                name.clone(),
                tensor.dtype.clone(),
                format!("{:?}", tensor.shape),
                ranks.join(" "),
                thousands(tensor.num_elems() as u64),
            ]
        })
        .collect();
    let settings: Vec<[String; 2]> =
        index.run.iter().map(|(key, value)| [key.clone(), value.clone()]).collect();
    let _ = write!(
        text,
        "\n{}\n\n{}\n\n{}",
        fitted(&["File", "Rank", "Size"], &files, |at| at < 1, line_width()),
        fitted(
            &["Tensor", "Type", "Shape", "Ranks", "Elements"],
            &tensors,
            |at| at < 4,
            line_width()
        ),
        fitted(&["Setting", "Value"], &settings, |_| true, line_width()),
    );
    text
}

fn megabytes(bytes: u64) -> String {
    format!("{} MB", grouped(bytes as f64 / 1e6, 2))
}

/// Verifies every checkpoint in the folder.
fn verify_all(folder: &Path) -> Result<u8> {
    let problems = problems_of_folder(folder);
    let found = if problems.is_empty() {
        find(folder).map_err(Failure::Usage)?
    } else {
        // The checkpoints that are there are read all the same.
        steps::in_order(folder)
    };
    let mut num_problems = problems.len();
    problems.iter().for_each(|problem| say(problem));
    for path in &found {
        let verified = verify(path);
        num_problems += verified.problems.len();
        if verified.problems.is_empty() {
            say(&format!(
                "{}: all of {} in {} match their digests",
                path.printable(),
                megabytes(verified.num_bytes),
                plural(verified.num_files, "file")
            ))
        } else {
            verified.problems.iter().for_each(|problem| say(problem))
        }
    }
    if num_problems == 0 {
        return Ok(0);
    }
    Err(Failure::Run(format!(
        "{} in {}: {}",
        plural(num_problems, "problem"),
        folder.printable(),
        plural(found.len(), "checkpoint") + " verified"
    )))
}

fn export_to(args: &ExportArgs, carried: Carried) -> Result<u8> {
    let ExportArgs { folder, to, optimizer, hugging_face, force } = args;
    let file = if *hugging_face { to.join("model.safetensors") } else { to.clone() };
    if *hugging_face {
        check_folder("--to", to, "pass a folder that you can write to")?
    } else {
        check_file("--to", to)?
    }
    check_new(&file, *force)?;
    let checkpoint = Checkpoint::open(folder).map_err(Failure::Usage)?;
    let reader = Reader::open(checkpoint.path()).map_err(Failure::Usage)?;
    let disk = Disk::default();
    let others =
        if *hugging_face { Some(beside_weights(&checkpoint, &reader, carried)?) } else { None };
    if let Some(others) = &others {
        let mut names = others.names().chain([CONFIG_FILE]);
        names.try_for_each(|name| check_new(&to.join(name), *force))?;
        make_folder(&disk, to)?;
        others.write(&disk, to)?;
    }
    let written = if *hugging_face {
        disk.replace(&file, None, |out| export_parameters(&reader, out))
    } else {
        write_stated(&disk, &file, |out| export(&reader, *optimizer, out))
    };
    let (num_tensors, num_bytes) = written.map_err(|error: io::Error| {
        Failure::io(format!("cannot export to {}", file.printable()), error)
    })?;
    say(&format!(
        "{}: {} of {}, {}",
        file.printable(),
        plural(num_tensors, "tensor"),
        checkpoint.path().printable(),
        megabytes(num_bytes)
    ));
    if let Some(others) = &others {
        let names: Vec<&str> = others.names().collect();
        if !names.is_empty() {
            say(&format!("Copied: {}", names.join(", ")));
        }
        others.advice(to).iter().for_each(|line| say(line));
    }
    Ok(0)
}

fn check_new(file: &Path, force: bool) -> Result<()> {
    // A link that leads nowhere is there too.
    if file.symlink_metadata().is_err() || force {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "--to {} is there already; pass --force to replace it, or another --to",
        file.printable()
    )))
}

/// The files of a folder of Hugging Face, without the weights.
fn beside_weights(
    checkpoint: &Checkpoint,
    reader: &Reader,
    carried: Carried,
) -> Result<HuggingFace> {
    let path = checkpoint.path().printable();
    let others = HuggingFace::of(&reader.index().run, carried)
        .map_err(|e| Failure::Run(format!("{path}: {e}")))?;
    let others = others.ok_or_else(|| {
        Failure::Usage(format!(
            "--hugging-face: {path} is of a model that transformers does not have; leave the flag out"
        ))
    })?;
    if let Ok(Some(json)) = others.copied(TOKENIZER) {
        // The index names the file. A stranger's index could name any file of the user, to be published with the weights.
        Tokenizer::from_json(Path::new(TOKENIZER), json.to_vec()).map_err(|e| {
            Failure::Usage(format!(
                "--hugging-face: {path} names another file as its tokenizer: {e}"
            ))
        })?;
    }
    Ok(others)
}
