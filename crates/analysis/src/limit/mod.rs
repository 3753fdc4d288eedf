//! Operations set against their limit: the larger of arithmetic over the peak, and bytes over the speed of memory.
//!
//! Input: timelines whose operators have arithmetic or shapes, or calls that somebody else has timed. Output: sums for each
//! operation and its shapes, and a table of them. The share of the limit is the limit divided by the time; that of several
//! operations is weighted by their times. `calls` finds the time of each operator in a trace.
//!
//! Source: Williams, Waterman and Patterson, Roofline, 2009.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use paceline_trace::{Shapes, Span};
use serde::{Deserialize, Serialize};

use crate::doctor::cards::{self, Card};
use crate::steps;
use crate::table::{Columns, Table};
use crate::timeline::Timeline;

mod calls;

/// The fact of a trace that holds the [`Speeds`] of its rank.
pub const SPEEDS: &str = "speeds";

/// The meaning of a table of operations.
pub const DEFINITION: &str = "The limit of an operation is the larger of its arithmetic over the peak and its bytes over the speed of \
                              memory: both measured on all ranks beside the recording, or those of the card's data sheet. Means over steps and ranks.";

/// The most operations in the table of a page.
pub const ROWS: usize = 200;

/// The same on a console.
pub const FEW: usize = 20;

/// The speeds that limit the operations of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speeds {
    /// Floating-point operations per second that it makes at most.
    pub flop_per_s: f64,
    /// Bytes of memory per second that it reads and writes at most.
    pub bytes_per_s: f64,
}

impl Speeds {
    /// The published speeds of a card for products in `f32`, `tf32`, `f16` or `bf16`; `None` if the card is not known, or does not
    /// multiply in this type.
    pub fn of_card(device: &str, dtype: &str) -> Option<Self> {
        Self::on(cards::of(device)?, dtype)
    }

    fn on(card: Card, dtype: &str) -> Option<Self> {
        let flop_per_s = match dtype {
            "f32" => card.single,
            "tf32" => card.tf32?,
            "f16" | "bf16" => card.half?,
            _ => return None,
        };
        Some(Self { flop_per_s, bytes_per_s: card.bytes_per_s })
    }

    /// The speeds in the words of [`Speeds::words`], unless they are absurd.
    pub(crate) fn parse(words: &str) -> Option<Self> {
        let (flop, bytes) = words.split_once(' ')?;
        let number = |word: &str| word.parse().ok().filter(|of| (1e3..1e24).contains(of));
        Some(Self { flop_per_s: number(flop)?, bytes_per_s: number(bytes)? })
    }

    /// As traces keep them.
    pub fn words(&self) -> String {
        format!("{:.0} {:.0}", self.flop_per_s, self.bytes_per_s)
    }

    /// The limit of an operation, in nanoseconds.
    pub fn limit_ns(&self, flop: u64, bytes: u64) -> f64 {
        1e9 * (flop as f64 / self.flop_per_s).max(bytes as f64 / self.bytes_per_s)
    }
}

/// Calls of an operation with the same shapes, or a sum of such.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    /// The operator.
    pub name: String,
    /// The shapes of its inputs, and their element type if it is known.
    pub shape: String,
    /// How often it was called.
    pub calls: u64,
    /// Its floating-point operations, in the direct form.
    pub flop: u64,
    /// The bytes that it reads and writes.
    pub bytes: u64,
    /// How long it took, in nanoseconds.
    pub time_ns: u64,
    /// How long it would take at its limit; `None` if the speeds are not known.
    pub limit_ns: Option<f64>,
}

impl Operation {
    /// A kernel that our recorder has timed.
    pub fn of_kernel(name: &str, shapes: &Shapes, span: Span, speeds: Option<Speeds>) -> Self {
        let words = |dims: &[u32]| dims.iter().map(u32::to_string).collect::<Vec<_>>().join("x");
        let shape = shapes.iter().map(words).collect::<Vec<_>>().join(" ");
        Self::new(name, shape, [shapes.flop, shapes.bytes, span.len_ns()], speeds)
    }

    fn new(
        name: &str,
        shape: String,
        [flop, bytes, time_ns]: [u64; 3],
        speeds: Option<Speeds>,
    ) -> Self {
        let limit_ns = speeds.map(|speeds| speeds.limit_ns(flop, bytes));
        Self { name: name.to_owned(), shape, calls: 1, flop, bytes, time_ns, limit_ns }
    }

    /// The part of its limit that it reaches. More than one if its bytes come from a cache, or if it computes in another form.
    pub fn share(&self) -> Option<f64> {
        self.limit_ns.map(|limit| limit / self.time_ns as f64)
    }

    fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.flop = self.flop.saturating_add(other.flop);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.time_ns = self.time_ns.saturating_add(other.time_ns);
        self.limit_ns = self.limit_ns.zip(other.limit_ns).map(|(a, b)| a + b);
    }
}

/// The operations of some steps, of one rank or several.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operations {
    /// Steps, over all ranks.
    pub steps: u64,
    /// Their time in sum, in nanoseconds.
    pub steps_ns: u64,
    /// The speeds of the first rank, if they were measured.
    pub speeds: Option<Speeds>,
    /// The operations, those that take most time first.
    pub all: Vec<Operation>,
}

impl Operations {
    /// Adds calls. Those of the same operation with the same shapes become one.
    pub fn add(&mut self, calls: impl IntoIterator<Item = Operation>) {
        let mut sums: BTreeMap<(String, String), Operation> = BTreeMap::new();
        for of in self.all.drain(..).chain(calls).filter(|of| of.time_ns > 0) {
            let key = (of.name.clone(), of.shape.clone());
            match sums.get_mut(&key) {
                Some(sum) => sum.add(&of),
                None => _ = sums.insert(key, of),
            }
        }
        self.all = sums.into_values().collect();
        self.all.sort_by_key(|of| Reverse(of.time_ns));
    }

    /// Adds the operations of another rank.
    pub fn add_rank(&mut self, other: Self) {
        self.steps += other.steps;
        self.steps_ns = self.steps_ns.saturating_add(other.steps_ns);
        self.speeds = self.speeds.or(other.speeds);
        self.add(other.all);
    }

    /// The operations of traces whose files have their arithmetic or their shapes.
    pub fn of(timelines: &[Timeline]) -> Self {
        let mut all = Self::default();
        for timeline in timelines {
            let steps = steps::of(timeline);
            let steps_ns =
                steps.iter().fold(0u64, |sum, of| sum.saturating_add(of.time.dur_ns as u64));
            let speeds = timeline.speeds;
            let mut of = Self { steps: steps.len() as u64, steps_ns, speeds, all: Vec::new() };
            of.add(calls::of(timeline));
            all.add_rank(of);
        }
        all
    }

    /// The sum of some of them.
    fn sum(name: &str, of: &[Operation]) -> Option<Operation> {
        let (first, rest) = of.split_first()?;
        let mut sum = Operation { name: name.to_owned(), shape: String::new(), ..first.clone() };
        rest.iter().for_each(|of| sum.add(of));
        Some(sum)
    }

    /// All of them together.
    pub fn whole(&self) -> Option<Operation> {
        Self::sum("all", &self.all)
    }

    /// The table of so many operations, with means over steps if there are any. Without room for all, those with the same name share a
    /// row, and then the shortest.
    #[rustfmt::skip]
    pub fn table(&self, rows: usize) -> Table {
        let per = self.steps.max(1) as f64;
        let columns = Columns::<Operation>::new()
            .add("name", "operation", ("", 0), "The operator.", |of| of.name.trim_start_matches("paceline::").to_owned())
            .add("", "first input", ("", 0), "", |of| of.shape.split(' ').next().unwrap_or("").to_owned())
            .add("shape", "", ("", 0), "The shapes of its inputs.", |of| of.shape.clone())
            .add("calls", "", ("", 1), "How often, per step.", move |of| of.calls as f64 / per)
            .add("gflop", "GFLOP", ("", 3), "Floating-point operations in the direct form, in 1e9: a multiply-add is two, a function 20. 0 where only bytes are known.", move |of| of.flop as f64 / 1e9 / per)
            .add("mb", "MB", ("", 2), "Bytes of its operands, in 1e6: read, written, or both.", move |of| of.bytes as f64 / 1e6 / per)
            .add("time_ms", "ms", ("", 3), "Time, per step.", move |of| of.time_ns as f64 / 1e6 / per)
            .add("limit_ms", "", ("ms", 3), "The larger of arithmetic over the peak and bytes over the speed of memory.", move |of| of.limit_ns.map(|ns| ns / 1e6 / per))
            .add("limit_pctg", "limit", ("%", 0), "The limit as a part of the time: above 100 where caches hold the operands, or if another form multiplies less.", |of| of.share().map(|of| 100.0 * of));
        let mut all = self.clone();
        if all.all.len() > rows {
            all.all.iter_mut().for_each(|of| of.shape.clear());
            all.add([]);
        }
        let (shown, others) = all.all.split_at(all.all.len().min(rows));
        columns.table(shown.iter().cloned().chain(Self::sum("others", others)).chain(self.whole()))
    }

    /// The share of the limit of a step, in a sentence; empty without speeds or operations.
    pub fn sentence(&self) -> String {
        let (Some(whole), per) = (self.whole(), 1e6 * self.steps.max(1) as f64) else {
            return String::new();
        };
        let time_ms = whole.time_ns as f64 / per;
        let unit = if self.steps == 0 { "ms" } else { "ms per step" };
        let Some((share, limit_ns)) = whole.share().zip(whole.limit_ns) else {
            return format!(
                "Operations take {time_ms:.2} {unit}. Their limit is not known: the traces do not have the speeds of the machine."
            );
        };
        let of_step = match self.steps_ns {
            0 => String::new(),
            ns => format!("; the whole step, {:.0} %", 100.0 * limit_ns / ns as f64),
        };
        let speeds = self.speeds.map_or(String::new(), |of| {
            format!(" ({:.1} GFLOP/s, {:.1} GB/s)", of.flop_per_s / 1e9, of.bytes_per_s / 1e9)
        });
        format!(
            "Operations take {time_ms:.2} {unit} and reach {:.0} % of their limit{speeds}{of_step}.",
            100.0 * share
        )
    }
}
