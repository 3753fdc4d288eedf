//! A checkpoint that is read: compared with a model and a run, and copied into place.
//!
//! It yields the position of the run, and the elements of any ranges that a rank holds, whichever ranks wrote them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_memory::{DType, Tensor};
use paceline_model::{BufferId, Layout, Optimizer, OptimizerConfig, Param, Storage};

use super::index::{INDEX, Index, Previous, TensorEntry, VERSION};
use super::pieces::{Ranges, params_in, strategy_prefix};
use super::reader::Reader;
use super::setting::Setting;
use super::steps::{self, SINGLE_FILE};
use crate::progress::{Best, LossScaling, Progress};

/// The names of tensors that only one rank needs begin like this.
const STRATEGY: &str = "strategy.";

/// The keys that an index has if the loss was scaled, and once there is an evaluation loss.
const SCALE: &str = "scaling-scale";
const EVAL_LOSS: &str = "eval-loss";

/// A number of an index. `{:?}` prints as many digits as are needed to read the same number back.
trait IndexNumber {
    fn text(&self) -> String;
    /// False if the text is not a number.
    fn read(&mut self, text: &str) -> bool;
}

impl<T: fmt::Debug + FromStr> IndexNumber for T {
    fn text(&self) -> String {
        format!("{self:?}")
    }

    fn read(&mut self, text: &str) -> bool {
        text.parse().map(|value| *self = value).is_ok()
    }
}

/// All numbers of the progress, and the optimizer's steps, by their keys in an index.
fn numbers<'a>(
    progress: &'a mut Progress,
    optimizer_steps: &'a mut u64,
) -> Vec<(&'static str, &'a mut dyn IndexNumber)> {
    let Progress { position, steps, samples, epoch, scaling, best } = progress;
    let mut all: Vec<(&str, &mut dyn IndexNumber)> = vec![
        ("epochs", &mut position.epoch),
        ("batches", &mut position.batch),
        ("steps", steps),
        ("samples-trained", samples),
        ("epoch-loss", &mut epoch.loss),
        ("epoch-correct", &mut epoch.correct),
        ("epoch-samples", &mut epoch.count),
        ("optimizer-steps", optimizer_steps),
    ];
    if let Some(of) = scaling {
        all.push((SCALE, &mut of.scale));
        all.push(("scaling-good-steps", &mut of.good_steps));
        all.push(("scaling-skipped-steps", &mut of.skipped_steps));
        all.push(("scaling-skipped-in-a-row", &mut of.skipped_in_a_row));
    }
    if let Some((loss, steps)) = &mut best.lowest {
        all.push((EVAL_LOSS, loss));
        all.push(("eval-loss-steps", steps));
        all.push(("evaluations-since", &mut best.since));
    }
    all
}

/// A checkpoint whose index has been read, and whose files are there.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) reader: Reader,
    progress: Progress,
    /// Optimizer steps that the optimizer's state has seen.
    pub optimizer_steps: u64,
}

/// A run's index without files and tensors. A continuation must have the same `settings`.
pub fn head(
    world_size: usize,
    strategy: &str,
    settings: &[Setting],
    mut optimizer_steps: u64,
    progress: &Progress,
) -> Index {
    let mut progress = *progress;
    let numbers = numbers(&mut progress, &mut optimizer_steps).into_iter();
    let numbers = numbers.map(|(key, number)| (key.to_owned(), number.text()));
    let settings = settings.iter().map(|of| (of.key.clone(), of.value.clone()));
    let run = numbers.chain(settings).collect();
    let (strategy, files, tensors) = (strategy.to_owned(), Vec::new(), BTreeMap::new());
    Index { version: VERSION, world_size, strategy, run, previous: None, files, tensors }
}

/// The checkpoints in a folder, the one to go on from first; the folder itself if it is a checkpoint. Fails if there is
/// none, or if the newest one is gone.
pub fn find(folder: &Path) -> std::result::Result<Vec<PathBuf>, String> {
    if folder.join(INDEX).exists() {
        return Ok(vec![folder.to_owned()]);
    }
    if let Some(problem) = steps::missing_head(folder) {
        return Err(problem);
    }
    let found = steps::in_order(folder);
    if !found.is_empty() {
        return Ok(found);
    }
    if folder.join(SINGLE_FILE).exists() {
        return Err(format!(
            "{SINGLE_FILE} there was written by an earlier version of this program: go on with the program that wrote it, or \
             start again in another folder"
        ));
    }
    Err(match folder.read_dir() {
        Err(error) => format!("{} cannot be read: {error}", folder.printable()),
        Ok(_) => format!("there is no checkpoint in {}", folder.printable()),
    })
}

impl Checkpoint {
    /// Opens the checkpoint in this folder, or the latest of several. Fails without one, if a file is missing or cut, or if
    /// another version of the format wrote it.
    pub fn open(folder: &Path) -> std::result::Result<Self, String> {
        let found = find(folder)?;
        Self::open_at(&found[0]).map_err(|problem| {
            let before = found[1..].iter().find_map(|path| Self::open_at(path).ok());
            let other = before.map_or_else(String::new, |before| {
                format!(
                    "; the checkpoint after step {} is there too: --resume auto with --save goes on from it, \
                     and so does --resume {}",
                    before.progress.steps,
                    before.path().printable()
                )
            });
            format!("{problem}{other}")
        })
    }

    /// Opens the first checkpoint of `found` that can be opened. Returns it with its index in `found` and, for the user,
    /// why it is not the first.
    pub fn open_last_good(
        found: &[PathBuf],
    ) -> std::result::Result<(usize, Self, Option<String>), String> {
        let mut broken = None;
        for (place, path) in found.iter().enumerate() {
            match Self::open_at(path) {
                Ok(opened) => {
                    let note = broken.map(|broken: String| opened.instead_of(&broken));
                    return Ok((place, opened, note));
                }
                Err(problem) => broken = broken.or(Some(problem)),
            }
        }
        Err(broken.unwrap_or_else(|| "there is no checkpoint".into()))
    }

    /// A sentence: this checkpoint is used because a later one is broken.
    pub fn instead_of(&self, broken: &str) -> String {
        let (name, steps) = (self.name(), self.progress.steps);
        format!("{broken}; training goes on from {name}, after step {steps}")
    }

    /// Opens the checkpoint in the folder `path`.
    pub fn open_at(path: &Path) -> std::result::Result<Self, String> {
        let named = |reason: String| format!("{}: {}", path.printable(), printable(&reason));
        Self::of(Reader::open(path)?).map_err(named)
    }

    fn of(reader: Reader) -> std::result::Result<Self, String> {
        let run = &reader.index.run;
        let scaling = run.contains_key(SCALE).then(LossScaling::default);
        let best = Best { lowest: run.contains_key(EVAL_LOSS).then_some((0.0, 0)), since: 0 };
        let mut progress = Progress { scaling, best, ..Progress::default() };
        let mut optimizer_steps = 0;
        for (key, number) in numbers(&mut progress, &mut optimizer_steps) {
            let text = run.get(key).ok_or_else(|| format!("it does not say its {key}"))?;
            if !number.read(text) {
                return Err(format!("its {key} ({text}) is not a number"));
            }
        }
        Ok(Self { reader, progress, optimizer_steps })
    }

    /// The folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.reader.path
    }

    /// The name of that folder.
    pub fn name(&self) -> String {
        let name = self.path().file_name().unwrap_or(self.path().as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// The contents of the checkpoint.
    pub fn index(&self) -> &Index {
        &self.reader.index
    }

    /// The progress of the run when it wrote the checkpoint.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// The digest of the whole checkpoint.
    pub fn digest(&self) -> String {
        self.index().digest()
    }

    /// The entry for this checkpoint in a later one in `folder`. `None` if this one lies elsewhere.
    pub fn as_previous(&self, folder: &Path) -> Option<Previous> {
        let own = self.path().canonicalize().ok()?;
        let is_there = own.parent() == folder.canonicalize().ok().as_deref();
        let steps = self.progress.steps;
        is_there.then(|| Previous { steps, sha256: self.digest() })
    }

    /// A setting of the run that wrote the checkpoint, by its flag.
    pub fn setting(&self, flag: &str) -> Option<&str> {
        self.index().run.get(flag.trim_start_matches('-')).map(String::as_str)
    }

    /// Fails unless the checkpoint has this model's parameters, this optimizer's state and the same settings. Returns the
    /// allowed differences in words.
    pub fn check(
        &self,
        layout: &Layout,
        optimizer: &OptimizerConfig,
        settings: &[Setting],
    ) -> std::result::Result<Vec<String>, String> {
        self.check_model(layout)?;
        let mut notes = Vec::new();
        for setting in settings {
            let theirs = self.index().run.get(&setting.key).map(String::as_str);
            // A build that did not know the setting wrote nothing of it.
            if theirs.unwrap_or("none") == setting.value {
                continue;
            }
            let difference = setting.refusal(theirs);
            if setting.may_differ { notes.push(difference) } else { return Err(difference) }
        }
        self.check_optimizer(layout, optimizer)?;
        Ok(notes)
    }

    /// Fails unless the checkpoint has this model's parameters and running statistics. The message names the first tensor
    /// that differs.
    pub fn check_model(&self, layout: &Layout) -> std::result::Result<(), String> {
        for (kind, name, shape) in layout.tensors() {
            let lacks = || format!("it has no {kind} {name}, which this model has");
            let what = format!("{kind} {name}");
            self.compare(&format!("model.{name}"), &what, shape.dims(), lacks)?;
        }
        let known: BTreeSet<&str> = layout.tensors().map(|(_, name, _)| name).collect();
        let is_known =
            |name: &str| name.strip_prefix("model.").is_none_or(|own| known.contains(own));
        match self.index().tensors.keys().find(|name| !is_known(name)) {
            Some(name) => Err(self.differs(&has_no_use_for(name))),
            None => Ok(()),
        }
    }

    fn check_optimizer(
        &self,
        layout: &Layout,
        optimizer: &OptimizerConfig,
    ) -> std::result::Result<(), String> {
        let states = optimizer.state_names();
        let of_optimizer = self.index().tensors.keys().filter_map(|name| {
            let (state, _) = name.strip_prefix("optimizer.")?.split_once('.')?;
            Some(state)
        });
        let theirs: BTreeSet<&str> = of_optimizer.collect();
        if theirs != states.iter().copied().collect() {
            let words = |states: Vec<&str>| match states.as_slice() {
                [] => "nothing".to_owned(),
                states => states.join(" and "),
            };
            return Err(self.differs(&format!(
                "its optimizer state is {}, and this run needs {}: pass the same --optimizer, and for sgd the same \
                 --momentum",
                words(theirs.into_iter().collect()),
                words(states.to_vec())
            )));
        }
        let of_param = |param: &Param| {
            let name = param.name.clone();
            states.iter().map(move |state| format!("optimizer.{state}.{name}"))
        };
        let trained = layout.trained();
        let needed: BTreeMap<String, _> = trained
            .flat_map(|(_, param)| of_param(param).map(|name| (name, param.whole_shape())))
            .collect();
        let is_other = |name: &&String| {
            let is_of_others = ["model.", STRATEGY].iter().any(|prefix| name.starts_with(prefix));
            !is_of_others && !needed.contains_key(*name)
        };
        if let Some(name) = self.index().tensors.keys().find(is_other) {
            return Err(self.differs(&if layout
                .params()
                .iter()
                .flat_map(of_param)
                .any(|own| own == *name)
            {
                "it has optimizer state of parameters that this run has frozen".to_owned()
            } else {
                has_no_use_for(name)
            }));
        }
        needed.iter().try_for_each(|(name, shape)| {
            let needs = "it lacks the optimizer state this run needs";
            let lacks = || format!("{needs} ({states:?}): it has no {name}");
            self.compare(name, name, shape.dims(), lacks)
        })
    }

    /// Fails unless there is a tensor of this name with this shape. `what` names it for the message.
    fn compare(
        &self,
        name: &str,
        what: &str,
        shape: &[usize],
        lacks: impl FnOnce() -> String,
    ) -> std::result::Result<(), String> {
        let Some(theirs) = self.index().tensors.get(name) else {
            return Err(self.differs(&lacks()));
        };
        let TensorEntry { shape: their_shape, dtype, .. } = theirs;
        let own = DType::F32;
        Err(self.differs(&if their_shape != shape {
            format!("{what} has shape {their_shape:?} there, and {shape:?} in this model")
        } else if theirs.dtype() != own {
            format!("{what} has type {dtype} there, and {own} in this model")
        } else {
            return Ok(());
        }))
    }

    fn differs(&self, reason: &str) -> String {
        format!("{}: {}", self.path().printable(), printable(reason))
    }

    /// For the user: the strategies' state that a run of this many ranks with this strategy drops.
    pub fn dropped(&self, world_size: usize, strategy: &str) -> Option<String> {
        let has_state = self.index().tensors.keys().any(|name| name.starts_with(STRATEGY));
        if !has_state || self.keeps_strategy(world_size, strategy) {
            return None;
        }
        let Index { world_size: ranks, strategy: theirs, .. } = self.index();
        Some(format!(
            "what {ranks} ranks with {theirs} kept for their next steps is dropped, because this run has \
             {world_size} with {strategy}: it ends with other weights than a run that was not interrupted"
        ))
    }

    fn keeps_strategy(&self, world_size: usize, strategy: &str) -> bool {
        self.index().world_size == world_size && self.index().strategy == strategy
    }

    /// Copies parameters, in these ranges of flat storage, and all running statistics into place.
    pub fn restore_model(&self, storage: &Storage, values: &[Range<usize>]) -> Result<()> {
        let layout = storage.layout();
        for (id, range) in values.iter().flat_map(|range| params_in(layout, range)) {
            let param = layout.param(id);
            let to = storage.values().slice(range.clone())?;
            self.copy_part(&format!("model.{}", param.name), param, range.start, &to)?;
        }
        for (at, buffer) in layout.buffers().iter().enumerate() {
            self.copy(&format!("model.{}", buffer.name), 0, &storage.buffer(BufferId(at))?)?;
        }
        Ok(())
    }

    /// Copies optimizer state in these ranges of flat storage into place.
    pub fn restore_optimizer(
        &self,
        storage: &Storage,
        optimizer: &mut Optimizer,
        state: &[Range<usize>],
        own_prefix: &str,
    ) -> Result<()> {
        let layout = storage.layout();
        for (id, range) in state.iter().flat_map(|range| params_in(layout, range)) {
            let param = layout.param(id);
            for (state, to) in optimizer.state_of(range.clone())? {
                let name = format!("optimizer.{state}.{}", param.name);
                let own = format!("{own_prefix}{name}");
                let is_own = self.index().tensors.contains_key(&own);
                self.copy_part(if is_own { &own } else { &name }, param, range.start, &to)?;
            }
        }
        optimizer.resume_after(self.optimizer_steps);
        Ok(())
    }

    /// Copies everything that the rank holds in these ranges into place, with the strategy's own tensors if ranks and
    /// strategy are the same.
    pub fn restore(
        &self,
        rank: RankOfRun,
        ranges: &Ranges,
        storage: &Storage,
        optimizer: &mut Optimizer,
        state: Vec<(String, Tensor)>,
    ) -> Result<()> {
        let keeps = self.keeps_strategy(rank.world_size, rank.strategy);
        let prefix = if keeps { strategy_prefix(rank.rank) } else { String::new() };
        self.restore_model(storage, &ranges.values)?;
        self.restore_optimizer(storage, optimizer, &ranges.state, &prefix)?;
        if keeps {
            for (name, to) in state.iter().filter(|(_, to)| to.num_elems() > 0) {
                self.copy(&format!("{prefix}{name}"), 0, to)?;
            }
        }
        Ok(())
    }

    /// Fills a tensor with the elements of a parameter, or of a part of one, from the place `start` of flat storage on.
    fn copy_part(&self, name: &str, param: &Param, start: usize, to: &Tensor) -> Result<()> {
        let begin = start - param.start;
        for (run, start) in param.in_whole(begin..begin + to.num_elems()) {
            self.copy(name, start, &to.slice(run.start - begin..run.end - begin)?)?;
        }
        Ok(())
    }

    /// Fills a tensor with the elements of a logical tensor from `start` on.
    fn copy(&self, name: &str, start: usize, to: &Tensor) -> Result<()> {
        let range = start..start + to.num_elems();
        let read = |bytes: &mut [u8]| self.reader.read(name, range, bytes).map_err(Failure::Run);
        to.as_bytes().overwrite(read)?
    }
}

/// A rank of the run that goes on.
#[derive(Clone, Copy, Debug)]
pub struct RankOfRun<'a> {
    /// Its number.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// Their strategy, with the settings that its own state depends on.
    pub strategy: &'a str,
}

fn has_no_use_for(name: &str) -> String {
    format!("it has {name}, which this run has no use for")
}
