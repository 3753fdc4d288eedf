//! Advice: is communication hidden, and if not, which change would hide it?
//!
//! Input: steps as all ranks saw them, and changes that could be made, each with its gain. They come from a run
//! or from trace files. Output: a few sentences, and their numbers. The sentences account for all exposed time: waiting for
//! slower ranks, what the change removes, and what remains. A gain that the spread of the steps hides is not promised.
//!
//! This module does not know which changes there are: code that knows the program that trains says which ones fit, and how
//! its users make them.
//!
//! | file | contents |
//! |---|---|
//! | here | whether there is something to gain, and the words |
//! | [`observed`] | steps as all ranks saw them, on one clock |
//! | [`cost`] | the cost of an operation, from its bytes |
//! | [`reducer`] | the same from traces of PyTorch's `DistributedDataParallel` |
//! | [`sizes`] | which size of buckets suits those |
//! | [`alone`] | the steps of traces without their communication, for predictions |
//! | [`replay`] | a backward pass replayed with a queue of operations |
//! | [`passes`] | the gain of other buckets, fewer bytes, or no blocking operations |
//! | [`gain`] | a gain with its spread, and the choice between changes |
//! | [`blame`] | whether a rank holds up the others |

pub mod alone;
pub mod blame;
pub mod cost;
pub mod gain;
pub mod observed;
pub mod passes;
pub mod reducer;
pub mod replay;
pub mod sizes;

use blame::Slowest;
use gain::{Gain, Remedy, best};
use observed::Observed;
use serde::Serialize;

/// Exposed communication below this percentage of the step needs no advice, and no smaller gain is advised.
const NEGLIGIBLE_PCT: f64 = 2.0;

/// Where the time of a step goes: means over ranks and steps, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Means {
    /// The step with the wait for its batch.
    pub wall_ms: f64,
    /// By how much the mean steps of two such runs differ, as far as these steps can tell.
    pub apart_ms: Option<f64>,
    /// Arithmetic and copies that synchronization adds.
    pub sync_ms: f64,
    /// The main thread is blocked on communication.
    pub exposed_ms: f64,
    /// The part of `exposed_ms` in which an operation waits for the last rank.
    pub exposed_wait_ms: f64,
    /// An operation runs.
    pub communication_ms: f64,
}

impl Means {
    /// The percentage of a step that is exposed communication; `None` if the steps had no communication or no length.
    pub fn exposed_pct(&self) -> Option<f64> {
        let pct = 100.0 * self.exposed_ms / self.wall_ms;
        (self.communication_ms != 0.0 && pct.is_finite()).then_some(pct)
    }

    /// A time that needs no advice.
    pub fn negligible_ms(&self) -> f64 {
        self.wall_ms * NEGLIGIBLE_PCT / 100.0
    }

    /// The least gain that is advised. Nobody could see a smaller one.
    pub fn least_ms(&self) -> f64 {
        self.apart_ms.unwrap_or(0.0).max(self.negligible_ms())
    }
}

/// The possible changes, and the sentences around them.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// The changes, in the order that decides between equals.
    pub remedies: Vec<Option<Remedy>>,
    /// A sentence that goes before the change, without full stop.
    pub note: Option<&'static str>,
    /// By how much steps usually end later than their operations explain, in milliseconds.
    pub unexplained_ms: Option<f64>,
    /// The sentence if no change holds, without full stop. By default it says that none gains more than the noise.
    pub otherwise: Option<String>,
}

/// Advice: its words, and its numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Sentences. The last one has no full stop.
    pub text: String,
    /// The numbers.
    pub account: Account,
}

/// The sources of the exposed communication of a step: waiting, the part that the change removes, and the rest add up to it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Account {
    /// Exposed communication: mean over ranks and steps.
    pub exposed_ms: f64,
    /// The part in which operations wait for slower ranks.
    pub waiting_ms: f64,
    /// The part that the change removes. Negative if more would be exposed.
    pub removed_ms: f64,
    /// The rest.
    pub remains_ms: f64,
    /// The change that is advised, as the sentences name it; `waiting` if the only advice is to look for what slows a rank.
    pub remedy: Option<String>,
    /// The gain of the step.
    pub gain: Option<Gain>,
    /// By how much the mean steps of two such runs differ, as far as these steps can tell: a gain has to be larger.
    pub apart_ms: Option<f64>,
    /// The cost of the change itself, within the gain.
    pub costs_ms: f64,
    /// Whether the change changes the weights.
    pub changes_weights: bool,
}

/// Returns the advice, or `None` if the figures need no advice.
///
/// `slowest` is the rank that the others waited for most. `beyond_exposed` is a change that also removes work of the ranks, so it can gain more than everything that is exposed. It
/// comes before the others. The others are asked for only if they matter.
pub fn advise(
    means: &Means,
    slowest: Option<Slowest>,
    observed: &Observed,
    beyond_exposed: Option<Remedy>,
    others: impl FnOnce() -> Changes,
) -> Option<Told> {
    let exposed_pct = means.exposed_pct()?;
    let least_ms = means.least_ms();
    let is_beyond = beyond_exposed.as_ref().is_some_and(|remedy| remedy.gain.holds(least_ms));
    if exposed_pct < NEGLIGIBLE_PCT && !is_beyond {
        let text = format!(
            "{:.2} ms of communication per step cost {exposed_pct:.1} % of it: there is nothing to gain from hiding more",
            means.communication_ms
        );
        return Some(Told { text, account: Account::new(means, None) });
    }
    let Changes { remedies, note, unexplained_ms, otherwise } = others();
    let remedies = [beyond_exposed].into_iter().chain(remedies).flatten();
    let remedy = best(remedies, |remedy| remedy.gain, least_ms);
    let account = Account::new(means, remedy.as_ref());
    if account.is_mostly_waiting() && !is_beyond {
        let account = Account { remedy: Some("waiting".to_owned()), ..Account::new(means, None) };
        let text = format!("{}. {}", account.words(), blame::waiting(means, slowest, observed));
        return Some(Told { text, account });
    }
    let mut sentences = vec![account.words()];
    sentences.extend(note.map(str::to_owned));
    match &remedy {
        Some(remedy) => sentences.extend(remedy.words(means)),
        None if unexplained_ms.is_some_and(|ms| ms > account.remains_ms / 2.0) => sentences.push(
            "Operations take longer than their size explains: look for what else uses the cores or the network"
                .to_owned(),
        ),
        None => sentences.push(otherwise.unwrap_or_else(|| no_gain(means))),
    }
    Some(Told { text: sentences.join(". "), account })
}

impl Account {
    fn new(means: &Means, remedy: Option<&Remedy>) -> Self {
        let exposed_ms = means.exposed_ms;
        let waiting_ms = means.exposed_wait_ms.min(exposed_ms);
        let transfer = exposed_ms - waiting_ms;
        // A change removes no more than the step has, even if the steps that were replayed have more than the mean.
        let removed_ms = remedy.map_or(0.0, |remedy| remedy.removes_ms.min(transfer));
        Self {
            exposed_ms,
            waiting_ms,
            removed_ms,
            remains_ms: transfer - removed_ms,
            remedy: remedy.map(|remedy| remedy.change.clone()),
            gain: remedy.map(|remedy| remedy.gain),
            apart_ms: means.apart_ms,
            costs_ms: remedy.and_then(|remedy| remedy.costs).map_or(0.0, |(_, ms)| ms),
            changes_weights: remedy.is_some_and(|remedy| remedy.changes_weights),
        }
    }

    /// Whether waiting is the largest part.
    fn is_mostly_waiting(&self) -> bool {
        self.waiting_ms > self.removed_ms.max(self.remains_ms)
    }

    /// Where the exposed time comes from, in a sentence.
    fn words(&self) -> String {
        let Self { exposed_ms, waiting_ms, removed_ms, remains_ms, .. } = self;
        let head = format!(
            "{exposed_ms:.2} ms of communication per step are exposed: {waiting_ms:.2} waiting for slower ranks"
        );
        match &self.remedy {
            Some(change) if self.gain.is_some() && *removed_ms >= 0.0 => format!(
                "{head}, {removed_ms:.2} that {change} would remove, and {remains_ms:.2} that would remain"
            ),
            _ => format!("{head}, and {:.2} of transfer", removed_ms + remains_ms),
        }
    }
}

impl Remedy {
    /// The gain of the step and other effects of the change, in sentences.
    fn words(&self, means: &Means) -> Vec<String> {
        let less = self.gain.words("less");
        let mut gain = if self.removes_ms < 0.0 {
            format!("With {} the step would take {less}", self.change)
        } else {
            format!("The step would take {less}")
        };
        if let Some((what, ms)) = self.costs {
            gain += &format!(", the {ms:.2} ms for {what} taken off");
        }
        let apart = means
            .apart_ms
            .map(|ms| format!("Two runs like this one differ by at least {ms:.2} ms"));
        let sync_ms = means.sync_ms;
        let compressing = (sync_ms > self.gain.ms / 2.0)
            .then(|| format!("Compressing takes {sync_ms:.2} ms now"));
        let changes = self.changes_weights.then(|| "It changes the weights".to_owned());
        [Some(gain), apart, compressing, self.also.clone(), changes].into_iter().flatten().collect()
    }
}

/// The sentence for steps whose noise hides every gain.
fn no_gain(means: &Means) -> String {
    let noise = means.apart_ms.map_or_else(
        || "the steps differ from each other".to_owned(),
        |ms| format!("two runs like this one differ, which is about {ms:.2} ms"),
    );
    format!("No other setting would gain more than {noise}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of 100 ms, 20 ms of them exposed.
    const MEANS: Means = Means {
        wall_ms: 100.0,
        apart_ms: None,
        sync_ms: 0.0,
        exposed_ms: 20.0,
        exposed_wait_ms: 4.0,
        communication_ms: 30.0,
    };

    fn remedy(ms: f64) -> Option<Remedy> {
        Some(Remedy::new("a faster network", Gain::steady(ms, 9)))
    }

    fn text(means: &Means, beyond_exposed: Option<Remedy>, changes: Changes) -> String {
        advise(means, None, &Observed::default(), beyond_exposed, || changes).unwrap().text
    }

    #[test]
    fn a_change_of_any_program_is_chosen_and_accounted_for() {
        let changes = Changes { remedies: vec![None, remedy(12.0)], ..Changes::default() };
        let told = advise(&MEANS, None, &Observed::default(), None, || changes).unwrap();
        let expected = "20.00 ms of communication per step are exposed: 4.00 waiting for slower ranks, 12.00 that a \
            faster network would remove, and 4.00 that would remain. The step would take 12.00 ms less (12.00 to 12.00 \
            in 8 of 10 steps)";
        assert_eq!(told.text, expected);
        assert_eq!(told.account.remedy.as_deref(), Some("a faster network"));
    }

    #[test]
    fn changes_are_asked_for_only_if_communication_is_exposed() {
        let hidden = Means { exposed_ms: 1.0, ..MEANS };
        let none = || panic!("nothing is to be gained");
        let told = advise(&hidden, None, &Observed::default(), None, none).unwrap();
        assert!(told.text.contains("nothing to gain"), "{}", told.text);
        assert_eq!(advise(&Means::default(), None, &Observed::default(), None, none), None);
        // Only a change that removes work of the ranks counts then.
        let told = text(&hidden, remedy(12.0), Changes::default());
        assert!(told.contains("The step would take 12.00 ms less"), "{told}");
    }

    #[test]
    fn without_a_change_the_reason_is_said() {
        let said = |changes| text(&MEANS, None, changes).split(". ").last().unwrap().to_owned();
        let late = Changes { unexplained_ms: Some(9.0), ..Changes::default() };
        assert!(said(late).starts_with("Operations take longer than their size explains"));
        let otherwise = Some("Nothing helps".to_owned());
        let known = Changes { unexplained_ms: Some(7.0), otherwise, ..Changes::default() };
        assert_eq!(said(known), "Nothing helps");
        assert!(said(Changes::default()).starts_with("No other setting would gain more than the"));
    }
}
