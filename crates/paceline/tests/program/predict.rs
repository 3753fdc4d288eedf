//! `paceline predict` of step times, from flags to tables, files and charts.
//!
//! Expected times are computed here by hand from the cost model: a message takes the latency and its bytes over the
//! bandwidth (the alpha-beta model of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
//! Operations in MPICH", 2005).

use crate::common::{Run, Sandbox, json};
use serde_json::Value;

/// 128 parts of 0.8 MB, which become final in the last 120 of 180 ms.
const GIVEN: &str = "--gradient-bytes 102.4e6 --compute-ms 180";
/// One bucket, final when computing ends. The sums of the loss travel just before it.
const AT_ONCE: &str = "--gradient-bytes 80MB --compute-ms 100 --backward-ms 0 --bucket-cap-mb 1000 --first-bucket-mb 1000";

fn predict(sandbox: &Sandbox, flags: &str) -> Run {
    sandbox.run(&format!("predict {flags}"))
}

/// The rows of a prediction for these flags.
fn rows(flags: &str) -> Vec<Value> {
    let sandbox = Sandbox::new();
    predict(&sandbox, &format!("{flags} --json p.json")).ok();
    json(&sandbox.path("p.json"))["rows"].as_array().unwrap().clone()
}

#[track_caller]
fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no {key} in {row}"))
}

#[track_caller]
fn close(a: f64, b: f64) {
    // Each of a few operations is rounded to nanoseconds.
    assert!((a - b).abs() < 1e-5, "{a}, not {b}");
}

#[test]
fn a_model_in_numbers_is_not_run() {
    let sandbox = Sandbox::new();
    let flags = format!("{GIVEN} --nproc 2,4 --links 100GB/s,1ms --algorithm ring");
    let files = "--json p.json --csv p.csv --charts charts";
    let run = predict(&sandbox, &format!("{flags} {files}")).ok();
    assert!(run.stdout.contains("Nothing was run."), "{}", run.stdout);
    // The first bucket has 2 parts, then come three of 33. The last one, of 27, is final when computing ends. It takes 2
    // (n-1) steps and one for headers.
    let rows = json(&sandbox.path("p.json"))["rows"].as_array().unwrap().clone();
    close(number(&rows[0], "step_ms"), 180.0 + 3.0 + (21.6e6 + 88.0) / 1e8);
    close(number(&rows[1], "step_ms"), 180.0 + 7.0 + (1.5 * 21.6e6 + 3.0 * 88.0) / 1e8);
    assert!(rows.iter().all(|row| row["algorithm"] == "ring"), "{rows:?}");
    assert!(rows.iter().all(|row| row["simple_step_ms"].is_null()), "{rows:?}");
    let csv = std::fs::read_to_string(sandbox.path("p.csv")).unwrap();
    assert!(csv.starts_with("ranks,link,algorithm,comm_ms"), "{csv}");
    assert_eq!(csv.lines().count(), 3);
    let charts = ["predict_efficiency.svg", "predict_step.svg"];
    let mut expected = vec!["charts".to_owned()];
    expected.extend(charts.map(|name| format!("charts/{name}")));
    expected.extend(["p.csv", "p.json"].map(str::to_owned));
    assert_eq!(sandbox.contents(), expected);
}

#[test]
fn hosts_of_several_ranks_have_two_speeds() {
    let hosts = "--nproc 8 --ranks-per-host 4 --link-in-host 100GB/s,1us --links 1GB/s,1ms";
    let step_ms = |algorithm: &str| {
        let rows = rows(&format!("{AT_ONCE} {hosts} {algorithm}"));
        (rows[0]["algorithm"].clone(), number(&rows[0], "step_ms"))
    };
    // Inside: 2 x 3/4 of 80 MB at 100 GB/s. Between: a host sends 4 rails of 20 MB, half of it as partial sums and half as
    // results. Three steps each. The 24 bytes of the loss: three steps, and the same headers; one rank sums all 6 bytes of a
    // rail.
    let inside_ms = |bytes: f64| (1.5 * bytes + 3.0 * 88.0) / 1e8 + 3e-3;
    let headers_ms = 4.0 * 4.0 * 88.0 / 1e6;
    let loss_ms = inside_ms(32.0) + headers_ms + 4.0 * 8.0 / 1e6 + 3.0;
    let (name, hybrid) = step_ms("");
    assert_eq!(name, "hybrid");
    close(hybrid, 100.0 + loss_ms + inside_ms(80e6) + 80.0 + headers_ms + 3.0);
    // Ring: a step for headers and 14 steps with an eighth of 80 MB, and of 24 bytes, over the slow link.
    let (name, ring) = step_ms("--algorithm ring");
    assert_eq!(name, "ring");
    let headers_ms = 16.0 * 88.0 / 1e6;
    close(ring, 100.0 + 2.0 * (headers_ms + 15.0) + 14.0 * (10.0 + 4e-6));
    // Direct: 4 ranks of a host send a block to each of 4 others, twice.
    let (_, direct) = step_ms("--algorithm direct");
    close(direct, 100.0 + 2.0 * (headers_ms + 3.0) + 2.0 * 16.0 * (10.0 + 4e-6));
    assert_eq!(step_ms("--algorithm auto"), ("hybrid".into(), hybrid));
}

/// More ranks send more headers and more of each bucket, so their step is never shorter.
#[test]
fn the_best_buckets_are_never_better_for_more_ranks() {
    for flags in ["--gradient-bytes 500MB --compute-ms 180 --backward-ms 120", GIVEN] {
        let links = ["10gbe", "25gbe", "100gbe", "nvlink4"];
        let rows = rows(&format!("{flags} --nproc 2,8,64 --links {}", links.join(" ")));
        for link in links {
            let of_link = rows.iter().filter(|row| row["link"] == link);
            let best: Vec<f64> = of_link.map(|row| number(row, "best_step_ms")).collect();
            assert!(best.len() == 3 && best.is_sorted(), "{flags} on {link}: {best:?}");
        }
        assert!(rows.iter().all(|row| number(row, "best_step_ms") <= number(row, "step_ms")));
    }
}

#[test]
fn the_slowest_link_has_the_efficiency_that_was_asked_for() {
    for flags in ["", "--algorithm ring --efficiency 75", "--efficiency 99.5 --backward-ms 10"] {
        let flags = format!("{GIVEN} --nproc 8 {flags}");
        let row = &rows(&format!("{flags} --links 10gbit,50us"))[0];
        let target = if flags.contains("75") { 75.0 } else { 90.0 };
        let target = if flags.contains("99.5") { 99.5 } else { target };
        let slowest = number(row, "slowest_gbit_s");
        let efficiency = |gbit_s: f64| {
            number(&rows(&format!("{flags} --links {gbit_s}gbit,50us"))[0], "efficiency_pct")
        };
        assert!((efficiency(slowest) - target).abs() < 1e-3, "{row}");
        assert!(efficiency(0.99 * slowest) < target, "{row}");
        // The next slower link with a name is not enough.
        let named = row["slowest_named"].as_str().unwrap();
        let names = [
            "1gbe", "10gbe", "25gbe", "40gbe", "100gbe", "edr", "200gbe", "hdr", "pcie4", "400gbe",
            "ndr", "pcie5", "nvlink2", "nvlink3", "nvlink4", "nvlink5",
        ];
        let all = rows(&format!("{flags} --links {}", names.join(" ")));
        let enough = all.iter().find(|row| number(row, "efficiency_pct") >= target).unwrap();
        assert_eq!(enough["link"], named);
    }
    // The loss alone takes three latencies of 50 ms.
    let run = predict(&Sandbox::new(), &format!("{AT_ONCE} --links 1gbit,50ms")).ok();
    assert!(run.stdout.contains("no bandwidth is enough for 90 %"), "{}", run.stdout);
}

#[test]
fn one_round_is_enough_for_charts() {
    let sandbox = Sandbox::new();
    let model = "--channels 4 --hidden 8 --samples 96 --batch-size 8 --warmup-steps 0";
    let flags = format!("{model} --rounds 1 --algorithm ring --links 1gbit,1ms --charts charts");
    let run = predict(&sandbox, &flags).ok();
    let line = run.line("    2  1gbit,1ms  ring ");
    assert_eq!(line.split_whitespace().count(), 5, "{line}");
    let chart = std::fs::read_to_string(sandbox.path("charts/predict_efficiency.svg")).unwrap();
    assert!(chart.contains("efficiency by bandwidth, ring"), "{chart}");
    // A single number of ranks makes no line over the number of ranks.
    assert!(!sandbox.path("charts/predict_step.svg").exists());
}

/// Only tcp has the ring.
#[test]
fn the_ring_is_measured_over_tcp() {
    let sandbox = Sandbox::new();
    let model = "--channels 4 --hidden 8 --samples 96 --batch-size 8 --warmup-steps 0 --rounds 1";
    let flags = "--transport tcp --algorithm ring --links measured --json p.json";
    predict(&sandbox, &format!("{model} {flags}")).ok();
    let row = &json(&sandbox.path("p.json"))["rows"][0];
    assert!(row["algorithm"] == "ring" && number(row, "comm_ms") > 0.0, "{row}");
}

/// A chart of three hundred decades took minutes.
#[test]
fn charts_of_links_that_no_one_has_are_drawn() {
    let sandbox = Sandbox::new();
    let links = format!("--links 0.0000000000001kbit,1us {}gbit,1us", "9".repeat(290));
    predict(&sandbox, &format!("{GIVEN} {links} --charts charts")).ok();
    assert!(sandbox.path("charts/predict_efficiency.svg").exists());
}

#[test]
fn predictions_stand_beside_measurements() {
    let sandbox = Sandbox::new();
    let flags = "--links 100mbit,1ms --rounds 1 --measure --nproc 2 --channels 4 --hidden 8";
    let run = predict(&sandbox, &format!("{flags} --json p.json --csv p.csv")).ok();
    assert!(run.stdout.contains("2 ranks side by side"), "{}", run.stdout);
    let report = json(&sandbox.path("p.json"));
    let row = &report["rows"][0];
    // Whether anything is exposed depends on when this busy machine has its gradients.
    let calibrated = report["calibrations"][0]["step_ms"].as_f64().unwrap();
    assert!(calibrated > 0.0 && number(row, "exposed_ms") >= 0.0, "{row}");
    let off = number(row, "step_ms") - calibrated - number(row, "exposed_ms");
    assert!(off.abs() < 1e-9 * calibrated, "{row}");
    // One all-reduce at least, of three steps of a millisecond.
    assert!(number(row, "comm_ms") > 2.99, "{row}");
    assert!(number(row, "measured_ms") > 0.0 && number(row, "ratio") > 0.0, "{row}");
    let csv = std::fs::read_to_string(sandbox.path("p.csv")).unwrap();
    assert_eq!(csv.lines().count(), 2);
}

/// Blocks of the page that begin with `$ paceline` are commands, with all that they print.
#[test]
fn the_page_on_prediction_shows_what_is_printed() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/prediction.md");
    let page = std::fs::read_to_string(path).unwrap();
    let mut num_commands = 0;
    for block in page.split("```").skip(1).step_by(2) {
        let block = block.trim_start_matches("text").trim_start();
        let Some(command) = block.strip_prefix("$ paceline ") else { continue };
        let (flags, expected) = command.split_once('\n').unwrap();
        let mut command = Sandbox::new().paceline();
        command.current_dir("/").args(flags.split_whitespace());
        let printed = Run::of(command).ok().stdout;
        assert_eq!(printed.trim_end(), expected.trim_end(), "paceline {flags}");
        num_commands += 1;
    }
    assert!(num_commands >= 4, "{num_commands} commands in docs/prediction.md");
}
