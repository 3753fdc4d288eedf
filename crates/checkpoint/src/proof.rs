//! Which checkpoints are proven, and where a run begins again after a number that is not finite.
//!
//! Saved weights are finite, but a step may have moved them so far that the next losses are not. So a checkpoint counts as
//! *good* once [`GOOD_AFTER_STEPS`] more steps had finite losses. A run keeps the last good one beside the newest ones
//! ([`Line`]), and a run that ended with a number that is not finite leaves a note ([`NotFinite`]), by which a restart begins
//! from the last good one.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use paceline_files::Printable;

use super::not_finite::NotFinite;
use super::opened::Checkpoint;
use super::steps;

/// Steps with finite losses after which a checkpoint is good.
pub const GOOD_AFTER_STEPS: u64 = 10;
/// How often a run begins again after the same step had numbers that are not finite.
pub const MAX_RETRIES: u64 = 2;

/// The checkpoints of a run that it must know to keep the right ones.
#[derive(Debug, Default)]
pub struct Line {
    /// The last one that is good, by its steps.
    pub good: Option<u64>,
    /// Those after it, oldest first.
    waiting: VecDeque<u64>,
}

impl Line {
    /// Those of a run that goes on from the checkpoint after `steps` steps in this folder.
    pub fn from(folder: &Path, steps: u64) -> Self {
        let is_on_way = |checkpoint, head| steps::way_to(folder, head).contains(&checkpoint);
        let good = steps::good(folder).and_then(|good| match good {
            good if is_on_way(good, steps) => Some(good),
            // The run goes back, and the steps up to that one have proven this one.
            good => Some(steps).filter(|steps| is_on_way(*steps, good)),
        });
        let waiting = Some(steps).filter(|steps| good != Some(*steps));
        Self { good, waiting: waiting.into_iter().collect() }
    }

    /// Records that all losses up to this step were finite.
    pub fn advance(&mut self, steps: u64) {
        while let Some(first) = self.waiting.front().copied()
            && first + GOOD_AFTER_STEPS <= steps
        {
            self.good = Some(first);
            self.waiting.pop_front();
        }
    }

    /// Adds a checkpoint that is complete. `kept` says which ones are still there.
    pub fn add(&mut self, steps: u64, kept: impl Fn(u64) -> bool) {
        self.waiting.retain(|waiting| *waiting < steps && kept(*waiting));
        self.waiting.push_back(steps);
    }

    /// Those that always stay: the last good one, and the one that will be good next.
    pub fn to_keep(&self) -> Vec<u64> {
        self.good.into_iter().chain(self.waiting.front().copied()).collect()
    }
}

/// Where a run that is started again begins.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Restart {
    /// The checkpoints, the one to go on from first.
    pub found: Vec<PathBuf>,
    /// Why that is not the newest one, for the user.
    pub note: Option<String>,
}

/// Decides from which checkpoint of a folder an automatic restart begins. `found` has the newest one first.
///
/// # Errors
///
/// If the run has ended at the same step too often, and if there is a note that cannot be read.
pub fn restart(folder: &Path, found: Vec<PathBuf>) -> Result<Restart, String> {
    let unchanged = |found| Ok(Restart { found, note: None });
    let Some(note) = NotFinite::read(folder)? else { return unchanged(found) };
    let steps_of = |path: &PathBuf| steps::steps_of(path.file_name()?.to_str()?);
    let head = found.first().map(steps_of);
    if head.is_some_and(|head| head.is_none_or(|head| head >= note.step)) {
        return unchanged(found);
    }
    let NotFinite { step, times, .. } = note;
    let given_up = |choice: &str| {
        format!(
            "step {step} was not finite in {times} runs in a row, so it is not tried again: lower --lr, or look at the \
             data, and {choice}"
        )
    };
    let Some(head) = head.flatten() else {
        let choice = "begin in another folder, or without --resume auto";
        return if times > MAX_RETRIES { Err(given_up(choice)) } else { unchanged(found) };
    };
    let good = steps::good(folder);
    // Skipped steps before the newest one have not tried its weights.
    let newest = Checkpoint::open_at(&found[0]).map(|newest| newest.progress()).ok();
    let skipping = newest.filter(|of| of.steps_with_update() < of.steps);
    let tried = skipping.map_or(step, |of| of.steps_with_update() + 1);
    let is_good =
        |steps: u64| good.is_some_and(|good| steps <= good) || steps + GOOD_AFTER_STEPS < tried;
    // Other checkpoints belong to a run that somebody has gone back from.
    let way = steps::way_to(folder, head);
    let mut line = found;
    line.retain(|path| steps_of(path).is_some_and(|steps| way.contains(&steps)));
    let first_good = line.iter().position(|path| steps_of(path).is_some_and(is_good));
    // Before one is good, the oldest one is the most likely to be.
    let from = first_good.unwrap_or(line.len() - 1);
    let chosen = line[from].printable().to_string();
    if times > MAX_RETRIES {
        return Err(given_up(&format!("choose where to go on, as in --resume {chosen}")));
    }
    let what =
        if first_good.is_some() { "the last good checkpoint" } else { "the oldest checkpoint" };
    let note = (from > 0).then(|| {
        let newest = steps::name(head);
        format!(
            "step {step} was not finite, so training goes on from {chosen}, {what}, and not from {newest}; a step that \
             is not finite is tried {MAX_RETRIES} times more"
        )
    });
    Ok(Restart { found: line.split_off(from), note })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use paceline_host::disk::Disk;

    use super::*;

    fn folder_with(steps: &[u64]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let folder = tempfile::tempdir().unwrap();
        let found = steps.iter().rev().map(|steps| folder.path().join(steps::name(*steps)));
        let found: Vec<_> = found.collect();
        for path in &found {
            fs::create_dir(path).unwrap();
            fs::write(path.join("index.json"), b"{}").unwrap();
        }
        (folder, found)
    }

    #[test]
    fn a_checkpoint_is_good_after_finite_steps_and_the_next_one_waits() {
        let mut line = Line::default();
        line.add(4, |_| true);
        line.advance(13);
        assert_eq!((line.good, line.to_keep()), (None, vec![4]));
        line.add(8, |_| true);
        line.add(12, |steps| steps != 8);
        line.advance(14);
        assert_eq!((line.good, line.to_keep()), (Some(4), vec![4, 12]));
        line.advance(100);
        assert_eq!((line.good, line.to_keep()), (Some(12), vec![12]));
        // A run goes back to the step before.
        line.add(50, |_| true);
        line.add(40, |_| true);
        assert_eq!(line.to_keep(), [12, 40]);
    }

    #[test]
    fn a_restart_begins_at_the_last_good_checkpoint() {
        let (folder, found) = folder_with(&[4, 8, 12, 16]);
        let path = folder.path();
        let begins = |found: &[PathBuf]| restart(path, found.to_vec()).map(|r| r.found[0].clone());
        assert_eq!(begins(&found), Ok(path.join(steps::name(16))));
        NotFinite::note(&Disk::default(), path, 20, "a").unwrap();
        // After step 8 eleven losses were finite, and after step 12 seven.
        let decided = restart(path, found.clone()).unwrap();
        assert_eq!(decided.found, [8, 4].map(|steps| path.join(steps::name(steps))));
        let note = decided.note.unwrap();
        assert!(
            note.contains("step-000000008, the last good") && note.contains("000016"),
            "{note}"
        );
        // No checkpoint here is known to be good.
        assert_eq!(begins(&found[..2]), Ok(path.join(steps::name(12))));
        // Later ones belong to a run that somebody has gone back from.
        assert_eq!(begins(&[found[2].clone(), found[0].clone()]), Ok(path.join(steps::name(8))));
        // A mark counts too.
        fs::write(path.join(steps::GOOD), steps::name(12)).unwrap();
        assert_eq!(begins(&found), Ok(path.join(steps::name(12))));
        // A run that has come further does not go back.
        let later = [path.join(steps::name(24)), path.join(steps::name(20))];
        assert_eq!(begins(&later), Ok(later[0].clone()));

        NotFinite::note(&Disk::default(), path, 20, "b").unwrap();
        assert!(begins(&found).is_ok());
        NotFinite::note(&Disk::default(), path, 20, "c").unwrap();
        let refused = begins(&found).unwrap_err();
        for words in ["step 20 was not finite in 3 runs", "--resume ", "step-000000012", "--lr"] {
            assert!(refused.contains(words), "{refused}");
        }
    }
}
