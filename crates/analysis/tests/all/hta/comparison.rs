//! HTA's figures, our figures, and where they differ. The example `hta_agreement` uses this file too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use paceline_analysis::hta::{
    Analysis, BoundBy, CriticalPath, KernelStats, Options, PathEdge, RankAnalysis, Rules, Summary,
    analyze,
};
use paceline_analysis::read::{self, Select};
use serde_json::Value;

/// Percentages may differ by this much.
const POINTS: f64 = 0.1;
/// Times may differ by this fraction of HTA's time.
const PART: f64 = 1e-3;
/// Times may differ by this many microseconds on top: HTA keeps times as 64-bit floats, which are 1 ns apart
/// at the large clock values of PyTorch's traces, and prints some times with two decimals.
const RESOLUTION_US: f64 = 0.011;

/// The analysis of the traces in a folder.
pub fn analysis(folder: &Path, rules: Rules) -> Analysis {
    let windows = read::find(&[folder.to_owned()], Select::Latest).unwrap();
    let timelines: Vec<_> =
        windows[0].files.iter().map(|file| read::open(&file.path).unwrap()).collect();
    analyze(&timelines, &Options { rules, ..Options::default() }).unwrap()
}

/// HTA's figures, our figures, and where they differ.
pub struct Comparison {
    analysis: Analysis,
    hta: Value,
    /// How many figures were compared.
    pub compared: usize,
    /// The figures that differ, as text.
    pub differences: Vec<String>,
}

impl Comparison {
    /// Compares the traces in a folder with the `hta.json` or `hta-rounded.json` in the same folder.
    pub fn of(folder: &Path, rules: Rules) -> Self {
        let file = match rules {
            Rules::HtaRounded => "hta-rounded.json",
            _ => "hta.json",
        };
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        let hta: Value = serde_json::from_str(&text).unwrap();
        let analysis = analysis(folder, rules);
        let mut all = Self { analysis, hta, compared: 0, differences: Vec::new() };
        let ranks: Vec<_> = all.analysis.ranks.iter().map(|rank| rank.rank).collect();
        let theirs = all.hta["ranks"].clone();
        all.same("ranks", &ranks.into(), &theirs);
        all.temporal();
        all.overlap();
        all.kinds(rules);
        all.kernels();
        all.idle();
        all.launches();
        all.copies();
        match rules {
            // HTA's call stacks need whole microseconds. With fractions, operators end before the events that
            // they contain begin, and paths go back in time.
            Rules::HtaRounded => all.critical_path(),
            // HTA's sort leaves open which of two events at the same time comes first. With whole
            // microseconds there are many such events.
            _ => all.queues(),
        }
        all
    }

    fn close(&mut self, what: &str, ours: f64, theirs: &Value, tolerance: f64) {
        self.compared += 1;
        let theirs = theirs.as_f64().unwrap_or_else(|| panic!("{what}: HTA has {theirs}"));
        if (ours - theirs).abs() > tolerance {
            self.differences.push(format!("{what}: {ours} here, {theirs} in HTA"));
        }
    }

    /// Ours in nanoseconds, theirs in microseconds.
    fn time(&mut self, what: &str, ours_ns: f64, theirs: &Value) {
        let tolerance = theirs.as_f64().unwrap_or(0.0).abs() * PART + RESOLUTION_US;
        self.close(what, ours_ns / 1e3, theirs, tolerance);
    }

    fn points(&mut self, what: &str, ours: Option<f64>, theirs: &Value) {
        match ours {
            Some(ours) => self.close(what, ours, theirs, POINTS),
            // A share of nothing is NaN in HTA, which JSON cannot express.
            None => self.same(what, &Value::Null, theirs),
        }
    }

    fn count(&mut self, what: &str, ours: u64, theirs: &Value) {
        self.close(what, ours as f64, theirs, 0.0);
    }

    fn same(&mut self, what: &str, ours: &Value, theirs: &Value) {
        self.compared += 1;
        if ours != theirs {
            self.differences.push(format!("{what}: {ours} here, {theirs} in HTA"));
        }
    }

    /// One of HTA's lists, one entry per row.
    fn rows(&self, key: &str) -> Vec<Value> {
        self.hta[key].as_array().unwrap_or_else(|| panic!("no {key}")).clone()
    }

    fn rank(&self, row: &Value) -> RankAnalysis {
        let rank = row["rank"].as_u64().unwrap() as usize;
        self.analysis.ranks.iter().find(|found| found.rank == rank).unwrap().clone()
    }

    fn temporal(&mut self) {
        for row in self.rows("temporal") {
            let rank = self.rank(&row);
            let what = format!("rank {}: temporal breakdown", rank.rank);
            let found = rank.temporal;
            let parts = [
                ("idle_time", found.idle_ns),
                ("compute_time", found.compute_ns),
                ("non_compute_time", found.non_compute_ns),
            ];
            for (name, ns) in parts {
                let key = format!("{name}(us)");
                self.time(&format!("{what}, {name}"), ns as f64, &row[key.as_str()]);
                let key = format!("{name}_pctg");
                self.points(&format!("{what}, {key}"), found.pctg(ns), &row[key.as_str()]);
            }
            self.time(&what, found.kernel_time_ns as f64, &row["kernel_time(us)"]);
        }
    }

    fn overlap(&mut self) {
        for row in self.rows("overlap") {
            let rank = self.rank(&row);
            let what = format!("rank {}: overlap", rank.rank);
            self.points(&what, rank.overlap.pctg(), &row["comp_comm_overlap_pctg"]);
        }
    }

    /// HTA has one list for all ranks. Rounding makes some kernels last -1 us. What HTA counts beside such a
    /// kernel depends on the order in which it happens to sort, so only percentages are compared when HTA
    /// rounds.
    fn kinds(&mut self, rules: Rules) {
        let mut ours: BTreeMap<String, i64> = BTreeMap::new();
        for (kinds, time_ns) in self.analysis.ranks.iter().flat_map(|rank| &rank.kinds) {
            let names: Vec<_> = kinds.iter().map(|kind| kind.name().to_uppercase()).collect();
            *ours.entry(names.join(" overlapping ")).or_default() += time_ns;
        }
        ours.retain(|_, time_ns| *time_ns > 0);
        let total: i64 = ours.values().sum();
        let rows = self.rows("kinds");
        let theirs: BTreeSet<_> = rows
            .iter()
            .filter(|row| row["sum"].as_f64() > Some(0.0))
            .map(|row| row["kernel_type"].as_str().unwrap().to_owned())
            .collect();
        for name in theirs.union(&ours.keys().cloned().collect()) {
            let row = rows.iter().find(|row| row["kernel_type"] == name.as_str());
            let zero = serde_json::json!({"sum": 0, "percentage": 0});
            let (row, ns) = (row.unwrap_or(&zero), ours.get(name).copied().unwrap_or(0));
            let what = format!("kinds of kernels, {name}");
            let pctg = 100.0 * ns as f64 / total as f64;
            self.points(&what, Some(pctg), &row["percentage"]);
            if rules == Rules::Hta {
                self.time(&what, ns as f64, &row["sum"]);
            }
        }
    }

    fn kernels(&mut self) {
        let rows = self.rows("kernels");
        let num_ours: usize = self.analysis.ranks.iter().map(named).sum();
        self.count("kernels by name", num_ours as u64, &rows.len().into());
        for row in rows {
            let rank = self.rank(&row);
            let name = row["name"].as_str().unwrap();
            let what = format!("rank {}: {name}", rank.rank);
            let Some(found) = rank.kernels.iter().find(|kernel| kernel.name == name) else {
                self.differences.push(format!("{what}: not here"));
                continue;
            };
            let KernelStats { kind, sum_ns, mean_ns, std_ns, min_ns, max_ns, .. } = found;
            self.same(&what, &kind.name().to_uppercase().into(), &row["kernel_type"]);
            self.time(&format!("{what}, sum"), *sum_ns as f64, &row["sum (us)"]);
            self.time(&format!("{what}, mean"), *mean_ns, &row["mean (us)"]);
            self.time(&format!("{what}, deviation"), *std_ns, &row["stddev"]);
            self.time(&format!("{what}, min"), *min_ns as f64, &row["min (us)"]);
            self.time(&format!("{what}, max"), *max_ns as f64, &row["max (us)"]);
        }
    }

    fn idle(&mut self) {
        let rows = self.rows("idle");
        for row in &rows {
            let rank = self.rank(row);
            let (stream, name) = (row["stream"].as_i64().unwrap(), row["idle_category"].as_str());
            let what = format!("rank {}: idle time of stream {stream}, {name:?}", rank.rank);
            let found = rank.idle.iter().find(|idle| idle.stream == stream);
            let Some(found) =
                found.and_then(|f| f.by_category.iter().find(|t| Some(t.category.name()) == name))
            else {
                self.differences.push(format!("{what}: not here"));
                continue;
            };
            self.time(&what, found.time_ns as f64, &row["idle_time"]);
            // HTA rounds the ratio to whole percents, so its own times are divided here.
            let of_stream = |other: &&Value| {
                (&other["rank"], &other["stream"]) == (&row["rank"], &row["stream"])
            };
            let times = rows.iter().filter(of_stream).map(|row| row["idle_time"].as_f64().unwrap());
            let theirs = row["idle_time"].as_f64().unwrap() / times.sum::<f64>();
            let theirs = if theirs.is_finite() { theirs.into() } else { Value::Null };
            match (found.ratio, &theirs) {
                (Some(ours), Value::Number(_)) => self.close(&what, ours, &theirs, POINTS / 100.0),
                (ours, _) => self.same(&what, &serde_json::json!(ours), &theirs),
            }
        }
    }

    fn launches(&mut self) {
        let all = self.hta["launches"].as_object().unwrap().clone();
        for (rank, theirs) in all {
            let rank = self.rank(&serde_json::json!({"rank": rank.parse::<u64>().unwrap()}));
            let what = format!("rank {}: launches", rank.rank);
            let ours = rank.launches.unwrap_or_else(|| panic!("{what}: none here"));
            for (key, found) in
                [("cpu", ours.cpu_ns), ("gpu", ours.gpu_ns), ("delay", ours.delay_ns)]
            {
                let (what, theirs) = (format!("{what}, {key}"), &theirs[key]);
                self.count(&format!("{what}, count"), found.count, &theirs["count"]);
                self.time(&format!("{what}, mean"), found.mean, &theirs["mean"]);
                self.time(&format!("{what}, median"), found.p50, &theirs["50%"]);
                self.time(&format!("{what}, max"), found.max, &theirs["max"]);
            }
            self.count(&format!("{what}, short"), ours.short_kernels, &theirs["short_kernels"]);
            self.count(&format!("{what}, slow"), ours.slow_calls, &theirs["slow_calls"]);
            self.count(&format!("{what}, late"), ours.long_delays, &theirs["long_delays"]);
        }
    }

    fn described(&mut self, what: &str, ours: &Summary, theirs: &Value) {
        self.count(&format!("{what}, count"), ours.count, &theirs["count"]);
        let values = [
            ("mean", ours.mean),
            ("std", ours.std),
            ("min", ours.min),
            ("25%", ours.p25),
            ("50%", ours.p50),
            ("75%", ours.p75),
            ("max", ours.max),
        ];
        for (key, ours) in values {
            // The standard deviation of one value is NaN in HTA.
            if theirs[key].is_null() && ours == 0.0 {
                continue;
            }
            let tolerance = theirs[key].as_f64().unwrap_or(0.0).abs() * PART + 1e-6;
            self.close(&format!("{what}, {key}"), ours, &theirs[key], tolerance);
        }
    }

    fn queues(&mut self) {
        for row in self.rows("queues") {
            let rank = self.rank(&row);
            let stream = row["stream"].as_i64().unwrap();
            let what = format!("rank {}: queue of stream {stream}", rank.rank);
            match rank.queues.iter().find(|queue| queue.stream == stream) {
                Some(queue) => self.described(&what, &queue.length, &row),
                None => self.differences.push(format!("{what}: not here")),
            }
        }
    }

    fn copies(&mut self) {
        for row in self.rows("copies") {
            let rank = self.rank(&row);
            let name = row["name"].as_str().unwrap();
            let what = format!("rank {}: {name}", rank.rank);
            match rank.copies.iter().find(|copies| copies.name == name).and_then(|c| c.gb_per_s) {
                Some(gb_per_s) => self.described(&what, &gb_per_s, &row),
                None => self.differences.push(format!("{what}: not here")),
            }
        }
    }

    fn critical_path(&mut self) {
        use BoundBy::{Cpu, GpuCommunication, GpuCompute};
        let all = self.hta["critical_path"].as_object().unwrap().clone();
        for (rank, theirs) in all {
            let rank = self.rank(&serde_json::json!({"rank": rank.parse::<u64>().unwrap()}));
            let what = format!("rank {}: critical path", rank.rank);
            let CriticalPath { total_ns, by_bound, edges, .. } =
                rank.critical_path.unwrap_or_else(|| panic!("{what}: none here"));
            // In whole microseconds, a kernel that is shorter than one of them lasts -1 in HTA, and 0 here.
            let is_short = |edge: &&PathEdge| {
                let is_work = matches!(edge.bound_by, Some(Cpu | GpuCompute | GpuCommunication));
                is_work && edge.dur_ns == 0
            };
            let num_short = edges.iter().filter(is_short).count() as f64;
            let mut time = |what: &str, ours_ns: i64, theirs: &Value| {
                let tolerance = theirs.as_f64().unwrap_or(0.0).abs() * PART + num_short;
                self.close(what, ours_ns as f64 / 1e3, theirs, tolerance);
            };
            time(&what, total_ns, &theirs["total"]);
            for (bound, value) in theirs["by_bound"].as_object().unwrap() {
                let ours = by_bound.iter().find(|(found, _)| found.name() == bound);
                let ours_ns = ours.map_or(0, |(_, ns)| *ns);
                time(&format!("{what}, {bound:?}"), ours_ns, value);
            }
        }
    }
}

/// How many names of kernels HTA lists for a rank. It leaves out those of the kind `other`.
fn named(rank: &RankAnalysis) -> usize {
    rank.kernels.iter().filter(|kernel| kernel.kind.name() != "other").count()
}
