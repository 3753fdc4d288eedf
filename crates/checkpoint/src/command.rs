//! `paceline checkpoint`: shows, verifies and exports checkpoints.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use paceline_data::text::Tokenizer;
use paceline_failure::outputs::{check_file, check_folder, make_folder, write_stated};
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plain_table, plural, say, thousands};
use paceline_model::pretrained::CONFIG_FILE;
use paceline_table::table::grouped;

use super::export::{export, export_parameters};
use super::hugging_face::{HuggingFace, TOKENIZER};
use super::index::{ShardFile, TensorEntry};
use super::opened::{Checkpoint, find};
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
    let (index, progress) = (checkpoint.index(), checkpoint.progress());
    let (epochs, batches) = (progress.position.epoch, progress.position.batch);
    let epochs =
        format!("{} complete, and {} of the next", thousands(epochs), plural(batches, "batch"));
    let others = steps::all(folder).into_iter().map(steps::name);
    let others: Vec<String> = others.filter(|name| *name != checkpoint.name()).collect();
    let facts = [
        ("Checkpoint", Some(checkpoint.path().printable().to_string())),
        ("Step", Some(thousands(progress.steps))),
        ("Epoch", Some(epochs)),
        ("Samples", Some(thousands(progress.samples))),
        ("Written by", Some(plural(index.world_size, "rank"))),
        ("Strategy", Some(index.strategy.clone())),
        ("Size", Some(megabytes(index.files.iter().map(|file| file.num_bytes).sum()))),
        ("Digest", Some(format!("sha256 {}", checkpoint.digest()))),
        ("Also there", Some(others.join(", ")).filter(|names| !names.is_empty())),
        ("Follows", index.previous.as_ref().map(|of| steps::name(of.steps))),
        ("Last good", steps::good(folder).map(steps::name)),
    ];
    let fact = |(name, value): (&str, Option<String>)| Some(format!("{name:<12}{}\n", value?));
    let facts: String = facts.into_iter().filter_map(fact).collect();
    let file = |(rank, file): (usize, &ShardFile)| {
        [file.name.clone(), rank.to_string(), megabytes(file.num_bytes)]
    };
    let files: Vec<_> = index.files.iter().enumerate().map(file).collect();
    let tensor = |(name, tensor): (&String, &TensorEntry)| {
        let ranks: BTreeSet<usize> = tensor.pieces.iter().map(|piece| piece.file).collect();
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let (shape, elems) = (format!("{:?}", tensor.shape), tensor.num_elems() as u64);
        [name.clone(), tensor.dtype.clone(), shape, ranks.join(" "), thousands(elems)]
    };
    let tensors: Vec<_> = index.tensors.iter().map(tensor).collect();
    let settings = index.run.iter().map(|(key, value)| [key.clone(), value.clone()]);
    format!(
        "{facts}\n{}\n\n{}\n\n{}",
        plain_table(["File", "Rank", "Size"], 1, &files, line_width()),
        plain_table(["Tensor", "Type", "Shape", "Ranks", "Elements"], 4, &tensors, line_width()),
        plain_table(["Setting", "Value"], 2, &settings.collect::<Vec<_>>(), line_width()),
    )
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
        match verify(path) {
            Ok((num_files, num_bytes)) => say(&format!(
                "{}: all of {} in {} match their digests",
                path.printable(),
                megabytes(num_bytes),
                plural(num_files, "file")
            )),
            Err(problems) => {
                num_problems += problems.len();
                problems.iter().for_each(|problem| say(problem));
            }
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
    let reader = &checkpoint.reader;
    let disk = Disk::default();
    let others = hugging_face.then(|| beside_weights(&checkpoint, carried)).transpose()?;
    if let Some(others) = &others {
        let mut names = others.copies().map(|(name, _)| name).chain([CONFIG_FILE]);
        names.try_for_each(|name| check_new(&to.join(name), *force))?;
        make_folder(&disk, to)?;
        others.write(&disk, to)?;
    }
    let written = if *hugging_face {
        disk.replace(&file, None, |out| export_parameters(reader, out))
    } else {
        write_stated(&disk, &file, |out| export(reader, *optimizer, out))
    };
    let (num_tensors, num_bytes) =
        written.map_err(Failure::cannot::<io::Error>("export to", &file))?;
    say(&format!(
        "{}: {} of {}, {}",
        file.printable(),
        plural(num_tensors, "tensor"),
        checkpoint.path().printable(),
        megabytes(num_bytes)
    ));
    if let Some(others) = &others {
        let names: Vec<&str> = others.copies().map(|(name, _)| name).collect();
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
    usage(format!(
        "--to {} is there already; pass --force to replace it, or another --to",
        file.printable()
    ))
}

/// The files of a folder of Hugging Face, without the weights.
fn beside_weights(checkpoint: &Checkpoint, carried: Carried) -> Result<HuggingFace> {
    let path = checkpoint.path().printable();
    let others = HuggingFace::of(&checkpoint.index().run, carried)
        .map_err(|e| Failure::Run(format!("{path}: {e}")))?;
    let others = others.ok_or_else(|| {
        Failure::Usage(format!(
            "--hugging-face: {path} is of a model that transformers does not have; leave the flag out"
        ))
    })?;
    if let Some((_, json)) = others.copies().find(|(name, _)| *name == TOKENIZER) {
        // The index names the file. A stranger's index could name any file of the user, to be published with the weights.
        Tokenizer::from_json(Path::new(TOKENIZER), json.to_vec()).map_err(|e| {
            Failure::Usage(format!(
                "--hugging-face: {path} names another file as its tokenizer: {e}"
            ))
        })?;
    }
    Ok(others)
}
