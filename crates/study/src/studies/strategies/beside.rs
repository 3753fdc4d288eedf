//! The runs of a comparison beside the published figures of the same strategies.
//!
//! Input: the rows of the comparison. Output: a table with a row per strategy, and lines that say what its columns mean
//! and on what the published figures were measured. It prints shares where the absolute figures of another machine and
//! model say nothing.

use crate::studies::bucket_cost::MIB;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::record::memory::RankMemory;
use paceline_settings::flags::Comparison;
use paceline_table::table::{Cell, Columns, Table};

use super::Row;
use super::published::{self, DataParallel, Sharding};

/// A table beside published figures.
pub(super) struct Beside {
    pub(super) table: Table,
    /// What its columns mean.
    notes: String,
}

impl Beside {
    /// The table with what has to be known about it.
    pub(super) fn text(&self, width: Option<usize>) -> String {
        format!(
            "\nBeside the published figures (p.), which are a reference only. They were measured on {}\n{}\n{}",
            published::MEASURED_ON,
            self.table.fitted(width),
            self.notes
        )
    }
}

/// The table of a comparison. `None` if it has no runs.
pub(super) fn table(comparison: Comparison, rows: &[Row]) -> Option<Beside> {
    let first = rows.first()?;
    match comparison {
        Comparison::DataParallel => Some(data_parallel(rows)),
        Comparison::Sharding => Some(sharding(rows, first)),
    }
}

/// The figures of `name`, of the run and published.
type Pair<'a, P> = (&'a Row, Option<&'static P>);

fn data_parallel(rows: &[Row]) -> Beside {
    let pairs = rows.iter().map(|row| -> Pair<DataParallel> {
        (row, published::DATA_PARALLEL.iter().find(|of| of.choice == row.choice))
    });
    let percent = ("", 2);
    let columns = Columns::new()
        .add("choice", "strategy", ("", 0), "The strategy.", |(row, _): &Pair<DataParallel>| {
            Cell::Text(row.choice.clone())
        })
        .add("compute_pct", "compute %", percent, "The step computes.", |(row, _)| {
            share(&row.summary, &["compute_ms"])
        })
        .add("published_compute_pct", "p.", percent, "Published.", |(_, of)| {
            of.map(|of| of.compute_pct)
        })
        .add(
            "non_compute_pct",
            "non-compute %",
            percent,
            "The step is blocked on communication.",
            |(row, _)| share(&row.summary, &["comm_exposed_ms"]),
        )
        .add("published_non_compute_pct", "p.", percent, "Published.", |(_, of)| {
            of.map(|of| of.non_compute_pct)
        })
        .add(
            "waiting_pct",
            "of it waiting %",
            percent,
            "The part of non_compute_pct in which an operation waits for the last rank.",
            |(row, _)| share(&row.summary, &["comm_exposed_wait_ms"]),
        )
        .add("idle_pct", "idle %", percent, "The wait for data, and the rest.", |(row, _)| {
            share(&row.summary, &["data_ms", "rest_ms"])
        })
        .add("published_idle_pct", "p.", percent, "Published.", |(_, of)| of.map(|of| of.idle_pct))
        .add(
            "overlap_pct",
            "hidden %",
            percent,
            "Hidden communication in percent of all.",
            |(row, _)| row.summary.number("overlap_pct"),
        )
        .add("published_overlap_pct", "p.", percent, "Published.", |(_, of)| {
            of.map(|of| of.overlap_pct)
        })
        .add(
            "overhead_pct",
            "comm. %",
            percent,
            "Communication in percent of communication and computation.",
            |(row, _)| comm_share(&row.summary, "comm_ms"),
        )
        .add("published_overhead_pct", "p.", percent, "Published.", |(_, of)| {
            of.map(|of| of.overhead_pct)
        })
        .add(
            "transfer_overhead_pct",
            "transfer only %",
            percent,
            "The same, of operations that move and reduce data.",
            |(row, _)| comm_share(&row.summary, "comm_move_ms"),
        )
        .add("calls_per_step", "calls/step", ("", 1), "Operations of a step.", |(row, _)| {
            row.summary.number("comm_ops_per_step")
        })
        .add("published_calls", "p. (trace)", ("", 1), "Published: of a trace.", |(_, of)| {
            of.map(|of| of.all_reduces)
        });
    let notes = "compute, non-compute, idle: percent of a step with the wait for its data, on the main thread; hidden: percent of communication; comm.: \
                 communication in percent of communication and computation, transfer only: without waiting for the last rank, \
                 which the published figures contain; calls/step: with that of the loss; p. calls: of a whole trace, \
                 where 582 is twice the 291 tensors of parameters\n\
                 The published runs accumulated 4 batches, except simple_ddp and ddp (--as-published); their epochs had 3 \
                 batches, so what they hid says nothing about the backward pass"
        .to_owned();
    Beside { table: columns.table(pairs), notes }
}

/// The sum of these times of a step, in percent of the step with the wait for its data.
fn share(summary: &RunSummary, names: &[&str]) -> Option<f64> {
    let parts = names.iter().map(|name| summary.number(name)).sum::<Option<f64>>()?;
    let wall = summary.number("wall_ms").filter(|wall| *wall > 0.0)?;
    Some(100.0 * parts / wall)
}

/// A time of communication, in percent of it and the computation together.
fn comm_share(summary: &RunSummary, name: &str) -> Option<f64> {
    let (communication, compute) = (summary.number(name)?, summary.number("compute_ms")?);
    Some(100.0 * communication / (communication + compute)).filter(|share| share.is_finite())
}

/// The memory of the ranks in a category at the end of a step, in MB of 1e6 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Memory {
    mean: f64,
    least: f64,
    most: f64,
}

impl Memory {
    fn of(summary: &RunSummary, category: &str) -> Option<Self> {
        let ranks: Vec<RankMemory> = summary.part("memory");
        let of_rank = |rank: &RankMemory| {
            Some(rank.after_step()?.get(category).copied().unwrap_or(0) as f64 / 1e6)
        };
        let all =
            ranks.iter().map(of_rank).collect::<Option<Vec<f64>>>().filter(|a| !a.is_empty())?;
        Some(Self {
            mean: all.iter().sum::<f64>() / all.len() as f64,
            least: all.iter().copied().fold(f64::INFINITY, f64::min),
            most: all.iter().copied().fold(0.0, f64::max),
        })
    }

    /// The range, if the ranks differ.
    fn range(self) -> Option<String> {
        (self.least < self.most).then(|| format!("{:.2}-{:.2}", self.least, self.most))
    }
}

/// The categories of memory: name for people, in summaries, and published.
type Category = (&'static str, &'static str, fn(&Sharding) -> Option<f64>);

const CATEGORIES: [Category; 3] = [
    ("model", "parameters", |of| of.model_mb),
    ("gradient", "gradients", |of| of.gradient_mb),
    ("optimizer", "optimizer", |of| of.optimizer_mb),
];

fn sharding(rows: &[Row], first: &Row) -> Beside {
    let is_as_many = first.summary.count("world_size") == published::WORLD_SIZE;
    let is_same_model = first.summary.count("params") == published::NUM_PARAMS && is_as_many;
    let base = rows.iter().find(|row| row.choice == published::SHARDING[0].choice);
    let base_summary = base.map(|row| row.summary.clone()).unwrap_or_default();
    let base_batch_s = base.and_then(batch_s);
    let pairs = rows.iter().map(|row| -> Pair<Sharding> {
        (row, published::SHARDING.iter().find(|of| of.choice == row.choice))
    });
    let mut columns = Columns::new().add(
        "choice",
        "strategy",
        ("", 0),
        "The strategy.",
        |(row, _): &Pair<Sharding>| Cell::Text(row.choice.clone()),
    );
    for (title, category, of) in CATEGORIES {
        let base_mb = Memory::of(&base_summary, category).map(|memory| memory.mean);
        columns = columns.add(
            format!("{title}_mb"),
            format!("{title} MB"),
            ("", 2),
            "Mean over the ranks, after a step.",
            move |(row, _)| Memory::of(&row.summary, category).map(|memory| memory.mean),
        );
        let range = move |row: &Row| Memory::of(&row.summary, category).and_then(Memory::range);
        if rows.iter().any(|row| range(row).is_some()) {
            columns = columns.add(
                format!("{title}_range_mb"),
                "range",
                ("", 0),
                "The least and the most of a rank, if they differ.",
                move |(row, _)| range(row).map_or(Cell::Missing, Cell::Text),
            );
        }
        columns = columns
            .add(
                format!("{title}_pct"),
                "%",
                ("", 1),
                "The mean in percent of the baseline's.",
                move |(row, _)| {
                    percent(Memory::of(&row.summary, category).map(|m| m.mean), base_mb)
                },
            )
            .add(
                format!("published_{title}_pct"),
                "p. %",
                ("", 1),
                "Published, in percent of the baseline's.",
                move |(_, published)| {
                    let published = published.filter(|_| is_as_many).and_then(of);
                    percent(published, of(&published::SHARDING[0]))
                },
            );
        if is_same_model {
            columns = columns.add(
                format!("published_{title}_mb"),
                "p. MB",
                ("", 2),
                "Published, in MB of 1e6 bytes.",
                move |(_, published)| published.and_then(of).map(|mb| mb * MIB / 1e6),
            );
        }
    }
    let columns = columns
        .add("batch_s", "batch s", ("", 4), "Mean time of a batch.", |(row, _)| batch_s(row))
        .add("batch_pct", "%", ("", 1), "In percent of the baseline's.", move |(row, _)| {
            percent(batch_s(row), base_batch_s)
        })
        .add(
            "published_batch_pct",
            "p. %",
            ("", 1),
            "Published, in percent of the baseline's.",
            |(_, of)| percent(of.and_then(|of| of.batch_s), published::SHARDING[0].batch_s),
        )
        .add("published_batch_s", "p. s", ("", 3), "Published.", |(_, of)| {
            of.and_then(|of| of.batch_s)
        });
    let shares = match is_as_many {
        true => "",
        false => {
            "; shares of memory depend on the number of ranks, so those of 2 ranks are left out"
        }
    };
    let notes = format!(
        "MB (1e6 bytes): after a step, mean over ranks, and the range where ranks differ; batch s: a step with the wait for its \
         data, divided by its batches, mean over ranks; %: of the baseline{shares}"
    );
    Beside { table: columns.table(pairs), notes }
}

fn percent(value: Option<f64>, of: Option<f64>) -> Option<f64> {
    Some(100.0 * value? / of.filter(|of| *of > 0.0)?)
}

/// The mean time of a batch, in seconds.
fn batch_s(row: &Row) -> Option<f64> {
    let wall_ms = row.summary.number("wall_ms").filter(|wall| *wall > 0.0)?;
    Some(wall_ms / row.batches_per_step / 1e3)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use paceline_settings::flags::Several;

    /// A run whose ranks hold these bytes of parameters, gradients and optimizer state.
    fn row(choice: &str, world_size: u64, params: u64, ranks: &[[u64; 3]]) -> Row {
        let memory = |[parameters, gradients, optimizer]: &[u64; 3]| {
            let bytes =
                json!({ "parameters": parameters, "gradients": gradients, "optimizer": optimizer });
            let phase = json!({ "phase": "step", "current_bytes": bytes, "peak_bytes": bytes });
            json!({ "phases": [phase], "peak_bytes": bytes })
        };
        let summary = json!({
            "world_size": world_size, "params": params, "wall_ms": 40.0, "compute_ms": 24.0,
            "comm_exposed_ms": 12.0, "comm_exposed_wait_ms": 8.0, "data_ms": 3.0, "rest_ms": 1.0,
            "overlap_pct": 25.0, "comm_ms": 16.0, "comm_move_ms": 6.0, "comm_ops_per_step": 3.0,
            "memory": ranks.iter().map(memory).collect::<Vec<_>>(),
        });
        Row {
            choice: choice.into(),
            strategy: choice.into(),
            accumulate: 2,
            batches_per_step: 2.0,
            seconds: 1.0,
            cost: None,
            same_bits: true,
            summary: summary.into(),
        }
    }

    #[test]
    fn every_published_choice_has_figures() {
        let names = |comparison: Comparison| -> Vec<&str> {
            comparison.selected(Several::Published).iter().map(|(name, _)| *name).collect()
        };
        let published: Vec<&str> = published::DATA_PARALLEL.iter().map(|of| of.choice).collect();
        assert_eq!(names(Comparison::DataParallel), published);
        let published: Vec<&str> = published::SHARDING.iter().map(|of| of.choice).collect();
        assert_eq!(names(Comparison::Sharding), published);
        for of in &published::DATA_PARALLEL {
            let sum = of.compute_pct + of.non_compute_pct + of.idle_pct;
            assert!((sum - 100.0).abs() < 0.03, "{}: {sum}", of.choice);
        }
    }

    #[test]
    fn data_parallel_shares_stand_beside_the_published_ones() {
        let rows = ["simple_ddp", "ddp"].map(|name| row(name, 2, 10, &[[1, 1, 2]; 2]));
        insta::assert_snapshot!(table(Comparison::DataParallel, &rows).unwrap().text(None));
    }

    #[test]
    fn memory_is_compared_where_it_can_be() {
        let mb = 1_000_000;
        let rows = |world_size: u64, params: u64| {
            let whole = vec![[4 * mb, 4 * mb, 8 * mb]; 2];
            let uneven = vec![[4 * mb, 4 * mb, 5 * mb], [4 * mb, 4 * mb, 3 * mb]];
            [("baseline", whole), ("zero1", uneven)]
                .map(|(name, ranks)| row(name, world_size, params, &ranks))
        };
        let text = |rows: &[Row]| table(Comparison::Sharding, rows).unwrap().table.text();
        insta::assert_snapshot!(table(Comparison::Sharding, &rows(2, 10)).unwrap().text(None));
        let of_four = text(&rows(4, 10));
        let of_same_model = text(&rows(2, published::NUM_PARAMS));
        assert!(!of_four.contains("50.0   50.0"), "{of_four}");
        assert!(
            of_same_model.contains("1447.31") || of_same_model.contains("1,447.31"),
            "{of_same_model}"
        );
    }
}
