//! The output of a run on the console. A view of the run's events.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use paceline_checkpoint::progress::{Evaluation, Progress, TestResult};
use paceline_failure::Result;
use paceline_files::Printable;
use paceline_host::bar::{self, Bar, Speed, three_digits, time_left};
use paceline_host::streams;
use paceline_host::text::{line_width, listed, plural, thousands};
use paceline_settings::config::TrainConfig;

use crate::figures::event::{Event, Listener, Regrouped, StepDone};
use crate::figures::facts::Facts;
use crate::figures::table::printed;
use crate::views::blocks::{detail_lines, end_lines};
use crate::views::head;

/// Without a terminal, a line is printed after a multiple of this many batches.
const LINE_EVERY: usize = 10;
/// The most such lines of a run, without those of [`LINE_AFTER`].
const LINES_OF_RUN: usize = 4;
/// After this time without a line, the next multiple of [`LINE_EVERY`] prints one.
const LINE_AFTER: Duration = Duration::from_secs(60);
/// The fewest steps between two lines about skipped updates.
const SKIPPED_EVERY: u64 = 10;

/// With this variable a run prints progress and evaluation, without head and report.
pub const ONLY_PROGRESS: &str = "PACELINE_ONLY_PROGRESS";

/// The console of rank 0.
#[derive(Debug)]
pub struct Console<'a> {
    config: &'a TrainConfig,
    folder: PathBuf,
    bar: Option<Bar>,
    batches_per_s: Speed,
    steps_per_s: Speed,
    /// The steps of this epoch.
    epoch: Batches,
    /// All steps.
    run: Batches,
    /// When the first epoch began.
    begin: Option<Instant>,
    /// The last step that a line said was skipped.
    said_skipped: Option<u64>,
    /// When the last line about a batch was printed.
    said_batch: Instant,
    /// The last text that the model has made.
    sampled: Option<String>,
    /// Whether [`ONLY_PROGRESS`] is set.
    is_only_progress: bool,
}

/// The times of batches on rank 0.
#[derive(Clone, Copy, Debug, Default)]
struct Batches {
    count: usize,
    data_ns: u64,
    /// The steps, and the wait for their data.
    wall_ns: u64,
}

impl Batches {
    fn add(&mut self, other: Self) {
        self.count += other.count;
        self.data_ns += other.data_ns;
        self.wall_ns += other.wall_ns;
    }

    /// The mean times of a batch.
    fn times(&self) -> String {
        let mean = |ns: u64| ns as f64 / self.count.max(1) as f64;
        let data = printed("data_ms").with_unit(mean(self.data_ns) / 1e6);
        format!("data {data}, batch {:.4} s", mean(self.wall_ns) / 1e9)
    }

    /// Their number and mean times.
    fn counted(&self) -> String {
        format!("{} batches, mean {}", self.count, self.times())
    }
}

impl<'a> Console<'a> {
    /// The console of a run with this folder.
    pub fn new(config: &'a TrainConfig, folder: &Path) -> Self {
        Self {
            config,
            folder: folder.to_owned(),
            bar: Bar::new(streams::stdout()),
            batches_per_s: Speed::default(),
            steps_per_s: Speed::default(),
            epoch: Batches::default(),
            run: Batches::default(),
            begin: None,
            said_skipped: None,
            said_batch: Instant::now(),
            sampled: None,
            is_only_progress: std::env::var_os(ONLY_PROGRESS).is_some(),
        }
    }

    fn say(&mut self, text: impl AsRef<str>) {
        match &mut self.bar {
            Some(bar) => bar.say(text.as_ref()),
            None => streams::stdout().line(text.as_ref()),
        }
    }

    /// Shows the progress of an epoch with `batches` batches done. `steps` is the number of steps so far, if any.
    fn show(&mut self, epoch: u64, batches: usize, steps: Option<(u64, f64)>) {
        let Some(bar) = &mut self.bar else { return };
        let of = self.config.steps_per_epoch;
        let mut facts = vec![format!("{batches}/{of}")];
        if let Some((steps, loss)) = steps {
            let left = self.config.total_steps().saturating_sub(steps);
            let per_batch = self.config.samples_per_batch();
            facts.extend(self.steps_per_s.per_s().map(|per_s| time_left(left as f64 / per_s)));
            facts.extend(self.batches_per_s.per_s().into_iter().flat_map(|per_s| {
                let (batches, samples) = (three_digits(per_s), three_digits(per_s * per_batch));
                [format!("{batches} batches/s"), format!("{samples} samples/s")]
            }));
            facts.push(format!("loss {}", printed("loss").shown(loss)));
        }
        let name = format!("Epoch {}/{}", epoch + 1, self.config.epochs);
        let (done, of) = (batches as u64, of as u64);
        bar.show(bar::Progress { name, done, of, facts });
    }

    /// Prints where a run with a checkpoint begins, and whether it has trained once on each of the `samples_before` samples
    /// before.
    fn resumed(&mut self, progress: &Progress, samples_before: u64) {
        let Some(resume) = &self.config.resume else { return };
        let folder = resume.folder().printable();
        let Progress { position, steps, samples, .. } = progress;
        if *steps == 0 {
            return self
                .say(format!("No checkpoint in {folder} yet: training starts from the beginning"));
        }
        let epochs = plural(position.epoch as usize, "epoch");
        if *steps >= self.config.total_steps() {
            let all = match self.config.steps {
                Some(_) => plural(*steps as usize, "step"),
                None => epochs,
            };
            return self.say(format!("Resumed from {folder}: all {all} are complete already"));
        }
        let begun = match position.batch {
            0 => String::new(),
            batches => format!(", {} of the next", plural(batches, "batch")),
        };
        let off = samples.abs_diff(samples_before);
        let samples = match samples.cmp(&samples_before) {
            Ordering::Equal => "no sample is repeated or skipped".to_owned(),
            Ordering::Greater => format!("{} are repeated", plural(off as usize, "sample")),
            Ordering::Less => format!("{} are skipped", plural(off as usize, "sample")),
        };
        self.say(format!(
            "Resumed from {folder}: {epochs}{begun} and {} are complete; {samples}",
            plural(*steps as usize, "step")
        ));
    }

    /// Says that an update was skipped, unless a recent line did.
    fn skipped(&mut self, StepDone { steps, scaling, .. }: &StepDone) {
        let is_due = self.said_skipped.is_none_or(|said| said + SKIPPED_EVERY <= *steps);
        let Some(scaling) = scaling.filter(|_| is_due) else { return };
        self.said_skipped = Some(*steps);
        let skipped = plural(scaling.skipped_steps as usize, "step");
        self.say(format!(
            "Step {steps}: its gradients overflowed, so the update was skipped; the loss scale is {} now ({skipped} \
             skipped so far)",
            scaling.scale
        ));
    }

    fn step(&mut self, StepDone { epoch, steps, batches, loss, times, .. }: &StepDone) {
        let (batches, loss) = (*batches, loss.loss);
        // The last step of an epoch may have fewer batches.
        let accumulate = self.config.strategy.accumulate;
        let before = batches.saturating_sub(1) / accumulate * accumulate;
        let (data_ns, wall_ns) = (times.data, times.step + times.data);
        let step = Batches { count: batches - before, data_ns, wall_ns };
        self.epoch.add(step);
        self.run.add(step);
        let now = Instant::now();
        self.batches_per_s.mark(now, self.run.count as u64);
        self.steps_per_s.mark(now, *steps);
        self.show(*epoch, batches, Some((*steps, loss)));
        let has_passed = |every: usize| batches / every > before / every;
        let is_due = match (self.config.output.log_every, &self.bar) {
            (Some(every), _) => has_passed(every),
            (None, None) => {
                let all = (self.config.total_steps() as usize).saturating_mul(accumulate);
                let every = LINE_EVERY * all.div_ceil(LINE_EVERY * LINES_OF_RUN).max(1);
                let is_late = now.duration_since(self.said_batch) >= LINE_AFTER;
                has_passed(every) || (is_late && has_passed(LINE_EVERY))
            }
            (None, Some(_)) => false,
        };
        if is_due {
            self.said_batch = now;
            let times = self
                .config
                .output
                .log_every
                .map_or(String::new(), |_| format!(", {}", step.times()));
            let loss = printed("loss").shown(loss);
            self.say(format!("Epoch {} Batch {batches} Loss: {loss}{times}", epoch + 1));
        }
    }

    /// An evaluation between steps; the one at the end is printed last.
    fn evaluated(&mut self, Evaluation { steps, result, .. }: &Evaluation) {
        let loss = printed("eval_loss").shown(result.sums.mean_loss());
        let (perplexity, over) = (perplexity(result), over(result));
        let accuracy = accuracy(result.accuracy());
        self.say(format!("Step {steps}: evaluation loss {loss}{perplexity}{accuracy}, {over}"));
    }

    /// Says who goes on after some ranks were lost or have joined.
    fn regrouped(&mut self, of: &Regrouped) {
        let members = |numbers: &[u64], one: &str, several: &str| {
            let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
            match numbers {
                [] => None,
                [number] => Some(format!("member {number} {one}")),
                _ => Some(format!("members {} {several}", words.join(", "))),
            }
        };
        let lost = members(&of.lost, "is lost", "are lost");
        let joined = members(&of.joined, "has joined", "have joined");
        let mut what: Vec<String> = lost.into_iter().chain(joined).collect();
        if what.is_empty() {
            what.push("other ranks are needed".into());
        }
        self.say(format!(
            "Step {}: {}; {} after {:.2} s",
            of.steps,
            what.join(", "),
            goes_on(of.ranks, of.idle),
            of.took.as_secs_f64()
        ));
    }

    /// Says why the run ends before its last step.
    fn early_stop(&mut self, steps: u64, best: f64, best_steps: u64) {
        let patience = self.config.evaluation.early_stop.unwrap_or_default() as usize;
        let (patience, best) = (plural(patience, "evaluation"), printed("eval_loss").shown(best));
        self.say(format!(
            "Step {steps}: the evaluation loss was not lower in {patience}, so the run ends; the lowest was {best} after \
             step {best_steps}"
        ));
    }

    /// The end of an epoch, or of the run within it.
    fn epoch_ended(&mut self, epoch: u64, cut_after: Option<usize>, facts: &str) {
        let counted = |_| format!("; {}", self.epoch.counted());
        let batches = self.config.output.log_every.map_or(String::new(), counted);
        // A part of an epoch is not called an epoch.
        let part = cut_after.map_or(String::new(), |batches| {
            format!(", {batches} of {} batches", self.config.steps_per_epoch)
        });
        let num_epochs = self.config.epochs;
        self.say(format!("Epoch {}/{num_epochs}{part}: {facts}{batches}", epoch + 1));
    }

    /// The time of all steps, if lines have that of some.
    fn trained(&mut self) {
        if let (Some(_), Some(begin)) = (self.config.output.log_every, self.begin) {
            let total = printed("total_s").with_unit(begin.elapsed().as_secs_f64());
            self.say(format!("Training: {total}, {}", self.run.counted()));
        }
    }

    fn ended(&mut self, facts: &Facts) {
        let is_verbose = self.config.output.verbose;
        let details = if is_verbose { detail_lines(facts, line_width()) } else { Vec::new() };
        let end = end_lines(facts, line_width());
        let text = self.sampled.take().map(|text| format!("A text: {text}"));
        let missing = facts.missing_files().into_iter().map(|what| format!("Not written: {what}"));
        details.into_iter().chain(text).chain(end).chain(missing).for_each(|line| self.say(line));
        let folder = self.folder.printable();
        let more = format!(" (paceline show {folder}; docs/output.md explains it)");
        let more = if is_verbose { "" } else { &more };
        self.say(format!("Run folder: {folder}/{more}"));
        if let Some(profile) = &self.config.profile {
            let folder = profile.folder.printable();
            self.say(format!("Traces: {folder} (paceline analyze {folder}; or ui.perfetto.dev)"));
        }
    }
}

impl Listener for Console<'_> {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Placed { .. } | Event::Built(_) | Event::Begun { .. }
                if self.is_only_progress => {}
            Event::Ended(facts) if self.is_only_progress => {
                if facts.outcome.evaluated.is_some() {
                    answer_lines(facts).iter().for_each(|line| self.say(line));
                }
            }
            Event::Placed { group, placements } => {
                self.say(head::title(self.config, group));
                head::places(placements, self.config.device, self.config.output.verbose)
                    .iter()
                    .for_each(|line| self.say(line));
            }
            Event::Built(model) => {
                self.say(head::size(model));
                self.say(head::samples(self.config));
            }
            Event::Begun { progress, samples_before } => {
                self.steps_per_s.mark(Instant::now(), progress.steps);
                self.resumed(progress, *samples_before);
            }
            Event::Regrouped(of) => self.regrouped(of),
            Event::EpochBegun { epoch } => {
                self.epoch = Batches::default();
                self.begin.get_or_insert_with(Instant::now);
                self.batches_per_s.mark(Instant::now(), self.run.count as u64);
                self.show(*epoch, 0, None);
            }
            Event::Step(step) => {
                if step.is_skipped() {
                    self.skipped(step);
                }
                self.step(step);
            }
            Event::Evaluated(evaluation) if !evaluation.is_final => self.evaluated(evaluation),
            Event::Sampled { steps, text } => {
                self.say(format!("Step {steps}, a text: {text}"));
                self.sampled = Some((*text).to_owned());
            }
            Event::EarlyStop { steps, best, best_steps } => {
                self.early_stop(*steps, *best, *best_steps);
            }
            Event::EpochEnded { epoch, sums, has_classes, cut_after, took } => {
                let accuracy = accuracy(has_classes.then(|| sums.accuracy()));
                let loss = printed("train_loss").shown(sums.mean_loss());
                let seconds = printed("total_s").with_unit(took.as_secs_f64());
                self.epoch_ended(*epoch, *cut_after, &format!("loss {loss}{accuracy}, {seconds}"));
            }
            Event::TrainingEnded(_) => {
                self.bar.iter_mut().for_each(Bar::clear);
                self.trained();
            }
            Event::Ended(facts) => self.ended(facts),
            Event::StepBegun { .. } | Event::Passes(..) | Event::Evaluated(_) | Event::Saved(_) => {
            }
        }
        Ok(())
    }
}

fn goes_on(ranks: usize, idle: usize) -> String {
    let idle = if idle > 0 { format!(" and {idle} idle") } else { String::new() };
    match ranks {
        1 => format!("1 rank goes on{idle}"),
        _ => format!("{ranks} ranks go on{idle}"),
    }
}

/// The answer of the run: the evaluation of the finished model, or else its last epoch.
pub(crate) fn answer_lines(facts: &Facts) -> Vec<String> {
    let outcome = facts.outcome;
    match (&outcome.evaluated, &outcome.trained) {
        (Some(evaluation), _) => evaluation_lines(&evaluation.result, &facts.config.class_names),
        (None, Some(sums)) => {
            let accuracy = accuracy(outcome.has_classes.then(|| sums.accuracy()));
            let loss = printed("train_loss").shown(sums.mean_loss());
            vec![format!("Training loss: {loss}{accuracy}")]
        }
        (None, None) => Vec::new(),
    }
}

/// The lines for an evaluation of a finished model, whose classes may have names.
pub fn evaluation_lines(result: &TestResult, classes: &[String]) -> Vec<String> {
    let loss = printed("eval_loss").shown(result.sums.mean_loss());
    let mut lines =
        vec![format!("Evaluation loss: {loss}{}, {}", perplexity(result), over(result))];
    let accuracy = result.accuracy();
    let shown = |part| printed("eval_accuracy_pct").shown(100.0 * part);
    lines.extend(accuracy.map(|part| format!("Evaluation accuracy: {}%", shown(part))));
    if !classes.is_empty() {
        lines.push(format!("Classes: {}", listed(classes)));
    }
    lines
}

/// The part that is classified correctly, after a comma.
fn accuracy(part: Option<f64>) -> String {
    let shown = |part: f64| printed("train_accuracy_pct").with_unit(100.0 * part);
    part.map_or(String::new(), |part| format!(", accuracy {}", shown(part)))
}

/// The perplexity of a language model, after a comma.
fn perplexity(result: &TestResult) -> String {
    let shown = |of: f64| format!(", perplexity {}", printed("eval_perplexity").shown(of));
    result.perplexity().map_or(String::new(), shown)
}

/// The unit over which the means of an evaluation are taken.
fn over(result: &TestResult) -> String {
    let samples = thousands(result.samples as u64);
    match result.tokens() {
        Some(tokens) => format!("over {} tokens of {samples} samples", thousands(tokens as u64)),
        None => format!("over {samples} samples"),
    }
}
