//! The output of `paceline predict`: tables that fit into 80 columns. Files have all columns in one table.

use paceline_host::text::{line_width, plain_table, plural};
use paceline_table::stats::noise_words;
use paceline_table::table::{Columns, Head, Table};

use super::compression::Compression;
use super::model::{Prediction, TracedSteps};
use super::traced::{Range, StrategyRow};
use super::{Found, Row};
use crate::noise::{MIN_ROUNDS, Spread};

const LINK: &str = "The link. With several ranks per host, the link between hosts.";

/// All columns.
#[rustfmt::skip]
fn columns() -> Columns<Row> {
    let (ms, gbit_s) = (("ms", 2), ("Gbit/s", 2));
    let of = |get: fn(&Prediction) -> f64| move |row: &Row| get(&row.prediction);
    let spread = |get: fn(Spread) -> f64| move |row: &Row| row.measured.map(get);
    let range = |get: fn(Range) -> Option<f64>| move |row: &Row| row.range.and_then(get);
    let compressed = |get: fn(Compression) -> f64| move |row: &Row| row.compression.map(get);
    Columns::new()
        .add("ranks", "ranks", ("", 0), "Number of ranks.", |row: &Row| row.network.ranks)
        .add("link", "link", ("", 0), LINK, |row| row.link.clone())
        .add("algorithm", "algorithm", ("", 0), "Of the all-reduce.", |row| row.network.way.name())
        .add("comm_ms", "comm.", ms, "All buckets of a step.", of(|of| of.comm_ms))
        .add("comm_pct", "comm.", ("%", 1), "Communication in percent of the step, if nothing of it were hidden.", |row| {
            100.0 * row.prediction.comm_ms / (row.prediction.comm_ms + row.step.alone_ms)
        })
        .add("exposed_ms", "exposed", ms, "From the end of the backward pass to the end of communication.", of(|of| of.exposed_ms))
        .add("overlap_pct", "hidden", ("%", 1), "The part of the communication before the end of the backward pass.",
            of(|of| of.overlap_pct))
        .add("step_ms", "ddp", ms, "The step of ddp.", of(|of| of.step_ms))
        .add("simple_step_ms", "simple_ddp", ms, "The step of simple_ddp.", |row| row.prediction.simple_step_ms)
        .add("best_bucket_mb", "best buckets", ("MiB", 4), "The bucket size with the shortest step.", of(|of| of.best_bucket_mb))
        .add("best_first_mb", "the first", ("MiB", 4), "The best size of the first bucket for best_bucket_mb.",
            of(|of| of.best_first_mb))
        .add("best_step_ms", "with them", ms, "The step with buckets of these sizes.", of(|of| of.best_step_ms))
        .add("measured_ms", "measured ddp", ms, "The measured step of ddp, the median over the rounds.", spread(|of| of.median))
        .add("measured_min_ms", "from", ms, "The shortest of a round.", spread(|of| of.min))
        .add("measured_max_ms", "to", ms, "The longest of a round.", spread(|of| of.max))
        .add("ratio", "predicted/measured", ("", 3), "step_ms over measured_ms.",
            |row| row.measured.map(|of| row.prediction.step_ms / of.median))
        .add("efficiency_pct", "efficiency", ("%", 1), "The step without communication, in percent of the step.",
            Row::efficiency_pct)
        .add("slowest_gbit_s", "slowest", gbit_s, "The slowest link of this latency with the efficiency that was asked for.",
            |row| row.slowest_gbit_s)
        .add("latency_us", "latency", ("us", 1), "Of the link.", |row| row.network.link.latency_s * 1e6)
        .add("slowest_named", "named link", ("", 0), "The slowest link with a name and that efficiency.", |row| row.slowest_named)
        .add("step_low_ms", "ddp from", ms, "9 of 10 steps of the trace take at least this long on the link.",
            range(|of| Some(of.step_low_ms)))
        .add("step_high_ms", "to", ms, "9 of 10 steps of the trace take at most this long on the link.",
            range(|of| Some(of.step_high_ms)))
        .add("slowest_low_gbit_s", "slowest from", gbit_s,
            "9 of 10 steps of the trace need a link of at least this bandwidth for the efficiency.", range(|of| of.slowest_low_gbit_s))
        .add("slowest_high_gbit_s", "to", gbit_s, "For 9 of 10 steps of the trace this bandwidth is enough for the efficiency.",
            range(|of| of.slowest_high_gbit_s))
        .add("half_step_ms", "fp16", ms, "The step of fp16.", compressed(|of| of.half_step_ms))
        .add("top_k_step_ms", "top_k", ms, "The step of top_k.", compressed(|of| of.top_k_step_ms))
        .add("pays", "pays", ("", 0), "What would pay.", |row| row.compression.map(|of| of.pays))
}

/// The step and its parts.
const STEPS: [&str; 6] =
    ["algorithm", "comm_ms", "comm_pct", "exposed_ms", "overlap_pct", "step_ms"];
/// Other ways to send the same gradients.
const OTHERS: [&str; 4] = ["simple_step_ms", "best_bucket_mb", "best_first_mb", "best_step_ms"];
/// The measurements, beside the prediction.
const MEASURED: [&str; 5] =
    ["step_ms", "measured_ms", "measured_min_ms", "measured_max_ms", "ratio"];
/// The efficiency, and the slowest link for the requested efficiency.
const EFFICIENCY: [&str; 4] = ["efficiency_pct", "slowest_gbit_s", "latency_us", "slowest_named"];

/// The steps with compressed gradients.
const COMPRESSION: [&str; 3] = ["half_step_ms", "top_k_step_ms", "pays"];
/// How far the steps of a trace vary.
const RANGE: [&str; 5] =
    ["step_ms", "step_low_ms", "step_high_ms", "slowest_low_gbit_s", "slowest_high_gbit_s"];

/// The table of links. A link has a name, a bandwidth in one direction in GB/s of 1e9 bytes, the time of its smallest
/// message in microseconds, and a note.
pub fn speeds(links: &[(&str, f64, f64, &str)]) -> String {
    let line = |&(name, gb_s, latency_us, note): &(&str, f64, f64, &str)| {
        let hundredths = |value: f64| ((value * 100.0).round() / 100.0).to_string();
        let numbers = [gb_s, 8.0 * gb_s, latency_us].map(hundredths);
        let [gb_s, gbit_s, latency_us] = numbers;
        [name.to_owned(), note.to_owned(), gb_s, gbit_s, latency_us]
    };
    let lines: Vec<[String; 5]> = links.iter().map(line).collect();
    plain_table(["Link", "Note", "GB/s", "Gbit/s", "Latency (us)"], 2, &lines, line_width())
}

/// The rows with all columns, for files.
pub fn table(rows: &[Row]) -> Table {
    columns().table(rows)
}

/// A table of the columns with these keys, after the number of ranks and the link.
fn part(rows: &[Row], keys: &[&str], width: Option<usize>) -> String {
    let is_in = |head: &Head| ["ranks", "link"].iter().chain(keys).any(|key| head.key == *key);
    table(rows).with_columns(is_in).fitted(width)
}

/// Everything that is printed below the first lines. `target` is the requested efficiency, in percent. Tables fit `width`.
pub fn text(found: &Found, target: f64, width: Option<usize>) -> String {
    let Found { calibrations, rows, strategies, .. } = found;
    let bases = calibrations.iter().map(|calibration| {
        let side_by_side = if calibration.ranks > 1 { " side by side" } else { "" };
        let ranks = format!("{}{side_by_side}", plural(calibration.ranks, "rank"));
        let first = calibration.ready.first().map_or(0.0, |line| line.ready_ms);
        format!(
            "Without communication, {ranks}: {:.2} ms per step;\n\
             gradients are final from {first:.2} to {:.2} ms{}",
            calibration.step_ms,
            calibration.backward_end_ms,
            match &calibration.traced {
                Some(traced) => traced_words(traced),
                None => calibration.spread.map_or(String::new(), |of| rounds_words(&of)),
            }
        )
    });
    let mut all: Vec<String> = bases.collect();
    all.extend(noise_of(found));
    all.push(format!("\n{}", part(rows, &STEPS, width)));
    if rows.iter().any(|row| row.measured.is_some()) {
        all.push(format!("\nMeasured on the emulated links:\n{}", part(rows, &MEASURED, width)));
    }
    if rows.iter().any(|row| row.range.is_some()) {
        all.push(format!(
            "\nThe steps of the trace differ. Within these bounds are 8 of 10, and the slowest\n\
             links that they need for {target} %:\n{}",
            part(rows, &RANGE, width)
        ));
    }
    if !strategies.is_empty() {
        all.push(format!("\nThe step of each strategy (ms):\n{}", by_strategy(strategies, width)));
    }
    all.push(format!(
        "\nComm. % is the part of communication in a step that hides nothing. Efficiency is\n\
         the step without communication, in percent of the step. Slowest link for {target} %:\n\
         its bandwidth with the latency of the row, and the slowest one with a name:\n{}",
        part(rows, &EFFICIENCY, width)
    ));
    if rows.iter().any(|row| row.slowest_gbit_s.is_none()) {
        all.push(format!(
            "\u{2013} in the column of Gbit/s: with this latency, no bandwidth is enough for {target} %."
        ));
    }
    let is_known = rows.iter().any(|row| row.prediction.simple_step_ms.is_some());
    let columns = if is_known { &OTHERS[..] } else { &OTHERS[1..] };
    all.push(format!("\nThe best sizes of buckets:\n{}", part(rows, columns, width)));
    if rows.iter().any(|row| row.compression.is_some()) {
        all.push(format!(
            "\nCompressed gradients: fp16 sends half of the bytes, top_k the largest tenth.\n{}",
            part(rows, &COMPRESSION, width)
        ));
    }
    all.join("\n")
}

/// The range of the steps of a trace, and how long they took.
fn traced_words(of: &TracedSteps) -> String {
    format!(
        ";\nsteps of {:.2} to {:.2} in 8 of 10; as traced, with communication: {:.2}",
        of.low_ms, of.high_ms, of.traced_ms
    )
}

/// The table of strategies: a row for each number of ranks and link.
fn by_strategy(strategies: &[StrategyRow], width: Option<usize>) -> String {
    let of_links: Vec<&[StrategyRow]> =
        strategies.chunk_by(|a, b| a.ranks == b.ranks && a.link == b.link).collect();
    let mut columns = Columns::new()
        .add("", "ranks", ("", 0), "Number of ranks.", |of: &&[StrategyRow]| of[0].ranks)
        .add("", "link", ("", 0), LINK, |of| of[0].link.clone());
    for (at, of) in of_links.first().copied().unwrap_or_default().iter().enumerate() {
        columns = columns
            .add("", of.strategy, ("", 2), "The step.", move |of| of.get(at).map(|of| of.step_ms));
    }
    columns.table(of_links).fitted(width)
}

/// The range of the rounds, or that they are too few for one.
fn rounds_words(of: &Spread) -> String {
    let rounds = plural(of.rounds, "round");
    if of.rounds < MIN_ROUNDS {
        return format!(
            ";\n{rounds} cannot tell noise from a difference: pass --rounds {MIN_ROUNDS} or more"
        );
    }
    format!("; steps of {:.2} to {:.2} in {rounds}", of.min, of.max)
}

/// The worth of the measurements: the cores that they lacked, and how far measurements of the same thing are apart.
fn noise_of(Found { calibrations, rows, waited_pct, .. }: &Found) -> Option<String> {
    let alone = calibrations.iter().filter_map(|calibration| calibration.spread);
    let all = alone.chain(rows.iter().filter_map(|row| row.measured));
    let all = all.filter(|of| of.rounds >= MIN_ROUNDS);
    noise_words(*waited_pct, all.map(|of| 100.0 * (of.max - of.min) / of.median).reduce(f64::max))
}

#[cfg(test)]
mod tests {
    use paceline_observe::insight::anatomy::ReadyLine;
    use paceline_strategies::BucketCaps;

    use super::super::model::{Calibration, Step};
    use super::super::network::{Network, Route};
    use super::super::stated::StatedModel;
    use super::*;

    fn row(link: &str, measured_ms: Option<f64>) -> Row {
        let prediction = Prediction {
            comm_ms: 12.0,
            exposed_ms: 6.0,
            overlap_pct: 50.0,
            step_ms: 46.0,
            simple_step_ms: Some(52.0),
            best_bucket_mb: 0.25,
            best_first_mb: 0.0625,
            best_step_ms: 44.0,
        };
        let given = StatedModel { gradient_bytes: 4, compute_ms: 40.0, backward_ms: 0.0 };
        let (layout, calibration) = given.model();
        let rounds = |ms: f64| Spread::of([Some(ms), Some(ms - 1.0), Some(ms + 2.0)]);
        Row {
            link: link.to_owned(),
            network: Network {
                ranks: 2,
                link: "10gbit,50us".parse().unwrap(),
                hosts: None,
                way: Route::Direct,
            },
            step: Step::new(&calibration, &layout, BucketCaps::new(1)).unwrap(),
            prediction,
            slowest_gbit_s: Some(12.5),
            slowest_named: Some("25gbe"),
            measured: measured_ms.and_then(rounds),
            range: None,
            compression: None,
        }
    }

    fn calibration(ranks: usize) -> Calibration {
        Calibration {
            ranks,
            step_ms: 40.0,
            compute_ms: 39.0,
            backward_begin_ms: 10.0,
            backward_end_ms: 30.0,
            spread: Spread::of([Some(39.0), Some(40.0), Some(43.5)]),
            ready: vec![ReadyLine { param: "a.weight".to_owned(), ready_ms: 20.0 }],
            ..Calibration::default()
        }
    }

    fn found(calibration: Calibration, rows: Vec<Row>) -> Found {
        Found { calibrations: vec![calibration], rows, ..Found::default() }
    }

    #[test]
    fn what_is_printed() {
        let compression =
            Some(Compression { half_step_ms: 44.0, top_k_step_ms: 60.0, pays: "fp16" });
        let none = Row { slowest_gbit_s: None, slowest_named: None, ..row("1gbit,50ms", None) };
        let rows = [row("10gbe", Some(47.5)), none].map(|row| Row { compression, ..row });
        let found = found(calibration(2), rows.into());
        let shown = text(&found, 90.0, None);
        insta::assert_snapshot!(shown);
        let widest = shown.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(80), "{shown}");
    }

    #[test]
    fn links_stand_in_a_table() {
        let links = [
            ("10 GbE", 1.25, 50.0, "line rate"),
            ("PCIe 4 x16", 31.507, 0.7, "per direction"),
            ("shm, 2 ranks", 8.123, 1.0, "measured here"),
        ];
        insta::assert_snapshot!(speeds(&links), @r"
        Link          Note            GB/s  Gbit/s  Latency (us)
        ------------  -------------  -----  ------  ------------
        10 GbE        line rate       1.25      10            50
        PCIe 4 x16    per direction  31.51  252.06           0.7
        shm, 2 ranks  measured here   8.12   64.98             1
        ");
    }

    #[test]
    fn noise_is_stated_or_said_to_be_unknown() {
        let one = Calibration { spread: Spread::of([Some(40.0)]), ..calibration(2) };
        let shown = text(&found(one, vec![row("10gbe", None)]), 90.0, None);
        let few =
            "to 30.00 ms;\n1 round cannot tell noise from a difference: pass --rounds 3 or more\n";
        assert!(shown.contains(few), "{shown}");
        let shown = text(&found(calibration(2), vec![row("10gbe", None)]), 90.0, None);
        assert!(shown.contains("; steps of 39.00 to 43.50 in 3 rounds\n"), "{shown}");
        assert!(shown.contains("vary: repeat, or expect at least +-11 %\n"), "{shown}");
        let mut found = found(calibration(2), vec![row("10gbe", None)]);
        found.waited_pct = Some(37.0);
        let shown = text(&found, 90.0, None);
        assert!(shown.contains("no core for 37 % of their time. Repeat, or"), "{shown}");
    }

    #[test]
    fn a_model_in_numbers_has_no_parameters_and_no_compression() {
        let mut row = row("10gbe", None);
        row.prediction.simple_step_ms = None;
        let given = Calibration { spread: None, ..calibration(1) };
        let shown = text(&found(given, vec![row]), 87.5, None);
        for absent in ["simple_ddp", "Measured", "round", "fp16", "\u{2013}"] {
            assert!(!shown.contains(absent), "{absent} in: {shown}");
        }
        assert!(shown.contains("Slowest link for 87.5 %"), "{shown}");
    }
}
