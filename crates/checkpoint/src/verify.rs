//! Compares every file of a checkpoint with its digests, and the checkpoints of a folder with the entries in later ones.

use std::path::Path;
use std::thread::ScopedJoinHandle;

use paceline_files::Printable;
use paceline_trace::thread_builder;

use super::index::Previous;
use super::reader::Reader;
use super::steps;

/// The faults of the folder as a whole: the newest checkpoint is gone, or one on the way to it is not the one that the
/// next one followed. Checkpoints that a run has removed because newer ones came do not count.
pub fn problems_of_folder(folder: &Path) -> Vec<String> {
    if let Some(problem) = steps::missing_head(folder) {
        return vec![problem];
    }
    let mut problems = Vec::new();
    let mut next = steps::in_order(folder).into_iter().next();
    while let Some(path) = next.take() {
        // Faults of this index are found where all its files are read.
        let Ok(reader) = Reader::open_index(&path) else { break };
        let Some(Previous { steps, sha256 }) = reader.index.previous.clone() else { break };
        let before = folder.join(steps::name(steps));
        let Ok(found) = Reader::open_index(&before) else { break };
        if found.index.digest() != sha256 {
            problems.push(format!(
                "{} is not the checkpoint that {} follows: its digest is {}, not {sha256}",
                before.printable(),
                path.printable(),
                found.index.digest()
            ));
            break;
        }
        let own_steps = path.file_name().and_then(|name| steps::steps_of(name.to_str()?));
        // Steps only grow, so this ends, whatever somebody has written.
        next = own_steps.is_some_and(|own| steps < own).then_some(before);
    }
    problems
}

/// Reads the checkpoint in the folder `path` as a whole. Files are read on several threads at once. Returns the number of files
/// and of their bytes; or the faults, with the file and the rank that wrote it.
pub fn verify(path: &Path) -> Result<(usize, u64), Vec<String>> {
    let reader = Reader::open_index(path).map_err(|problem| vec![problem])?;
    let files = &reader.index.files;
    let num_threads = std::thread::available_parallelism().map_or(1, usize::from).min(files.len());
    let problems: Vec<String> = std::thread::scope(|scope| {
        let start = |first| {
            let reader = &reader;
            let work = move || {
                let own = (first..files.len()).step_by(num_threads);
                let problems = own.map(|file| match reader.problem_with(file) {
                    Some(problem) => vec![problem],
                    None => reader.verify_file(file),
                });
                problems.flatten().collect::<Vec<_>>()
            };
            // Without a thread, this one reads its files: that takes longer and changes nothing else.
            thread_builder("verify").spawn_scoped(scope, work).map_err(|_| work())
        };
        let threads: Vec<_> = (0..num_threads).map(start).collect();
        let panicked = |_| vec!["a thread that reads has panicked".to_owned()];
        let join = |thread: Result<ScopedJoinHandle<Vec<String>>, Vec<String>>| {
            thread.map_or_else(|problems| problems, |thread| thread.join().unwrap_or_else(panicked))
        };
        threads.into_iter().flat_map(join).collect()
    });
    let num_bytes = files.iter().map(|file| file.num_bytes).sum();
    if problems.is_empty() { Ok((files.len(), num_bytes)) } else { Err(problems) }
}
