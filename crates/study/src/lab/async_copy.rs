//! `async-copy`: how batches come to the step: made in line or ahead, copied while the step waits or beside it.
//!
//! On the processor a batch is made (read, decoded, collated) straight into the memory that the step reads, in line or by a
//! thread that is ahead. To a device it is then copied: from ordinary or pinned memory, with the host waiting or not, on the
//! stream of the kernels or on one of its own. Scenes differ in the time to decode a sample, and in the bandwidth of copies.

use std::path::Path;

use paceline_failure::Result;
use paceline_table::chart::{Axis, Picture, Series, Stroke};
use paceline_table::table::Columns;

use super::args::LabArgs;
use super::{Experiment, Made, runs};
use crate::outcome::Row;
use crate::report::Found;
use crate::scene::Scene;
use crate::spec::Spec;

/// The experiment.
pub const EXPERIMENT: Experiment = Experiment {
    name: "async-copy",
    about: "batches made ahead of the step, and copied beside it",
    question: "When does it pay to make batches ahead, to pin memory, and to copy beside the step?",
    set_here: &[
        ("load-ahead", "the experiment varies it"),
        ("decode-us", "the experiment varies it"),
        ("pin-memory", "the experiment varies it"),
        ("non-blocking", "the experiment varies it"),
        ("copy-stream", "the experiment varies it"),
    ],
    figures: &["data_ms", "copy_ms", "to_device_ms", "copy_hidden_ms"],
    scenes,
    found,
};

/// The microseconds that a sample takes to decode on the processor.
const DECODE_US: [f64; 4] = [0.0, 100.0, 200.0, 400.0];
/// The bandwidths of copies to the emulated device, in Gbit/s.
const COPY_GBIT: [f64; 3] = [4.0, 0.4, 0.1];
/// The device, except for the bandwidth of its copies.
const SIM: &str = "sim:copy";

fn scenes(args: &LabArgs, _: &Path) -> Result<Vec<Scene>> {
    let base = runs(args, &[("nproc", "1"), ("steps", "12"), ("warmup-steps", "2")]);
    let device = base.get("device").and_then(|of| of.first()).map(String::as_str);
    let mut scenes = Vec::new();
    if device.is_none_or(|name| name == "cpu") {
        let on_cpu = |base: &Spec, decode: f64| {
            let base = base.with("decode-us", decode);
            move |scene: Scene| {
                let with = |ahead| base.with("load-ahead", ahead);
                scene.with("in line", with(0)).with("a thread ahead", with(2))
            }
        };
        for decode in DECODE_US {
            let name = format!("processor, a sample takes {decode} us");
            scenes.push(on_cpu(&base, decode)(Scene::new(name).at(decode)));
        }
        if !args.train.0.has("nproc") {
            // As many ranks as cores: the thread has to take its time from a rank.
            let ranks = paceline_host::resources::num_cores().max(2);
            let full = base.with("nproc", ranks);
            let name = format!("processor, {ranks} ranks and no spare core, a sample takes 200 us");
            scenes.push(on_cpu(&full, 200.0)(Scene::new(name)));
        }
    }
    let devices: Vec<(String, String)> = match device {
        None => COPY_GBIT
            .iter()
            .map(|gbit| {
                (format!("{SIM}={gbit}gbit,10us"), format!("emulated device, {gbit} Gbit/s"))
            })
            .collect(),
        Some("cpu") => Vec::new(),
        Some(other) => vec![(other.to_owned(), format!("device {other}"))],
    };
    for (device, name) in devices {
        let base = base.with("device", device);
        let synthetic = base.get("data").is_none_or(|of| of == ["synthetic"]);
        let base = if synthetic { base.with("generate-on-host", "true") } else { base };
        // Otherwise data that is read would be made ahead.
        let base = base.with("load-ahead", 0);
        let with =
            |keys: &[&str]| keys.iter().fold(base.clone(), |spec, key| spec.with(key, "true"));
        let all = ["pin-memory", "non-blocking", "copy-stream"];
        scenes.push(
            Scene::new(name)
                .with("in line", base.clone())
                .with("pinned", with(&all[..1]))
                .with("non-blocking", with(&all[1..2]))
                .with("copy stream", with(&all[2..]))
                .with("all three", with(&all))
                .with("all three, and a thread ahead", with(&all).with("load-ahead", 2)),
        );
    }
    Ok(scenes)
}

/// The load that is hidden and exposed on the processor, and the same if a thread ahead hid all that it can.
fn found(made: &Made) -> Result<Vec<Found>> {
    // Microseconds of a sample, load of a batch, step, what it still waits, the most it can bring, measured.
    let pair = |rows: &[Row]| -> Option<[f64; 6]> {
        let [line, ahead] = rows else { return None };
        let (at, load, step) = (line.at?, line.median("data_ms")?, line.median("step_ms")?);
        let (exposed, most) = (ahead.median("data_ms")?, (step + load) / step.max(load));
        Some([at, load, step, exposed, most, ahead.effect.map_or(f64::NAN, |effect| effect.ratio)])
    };
    let rows: Vec<[f64; 6]> = made.outcome.scenes().filter_map(pair).collect();
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let ms = ("ms", 2);
    let table = Columns::new()
        .add("decode_us", "a sample takes", ("us", 0), "", |of: &[f64; 6]| of[0])
        .add("load_ms", "load of a batch", ms, "", |of| of[1])
        .add("step_ms", "step without it", ms, "", |of| of[2])
        .add("exposed_ms", "exposed, a thread ahead", ms, "", |of| of[3])
        .add("hidden_ms", "hidden", ms, "", |of| of[1] - of[3])
        .add("most", "(step + load) / the longer", ("", 2), "", |of| of[4])
        .add("measured", "measured", ("", 2), "", |of| of[5])
        .table(&rows);
    let line = |name: &str, at: usize, stroke, look| {
        Series::line(name, rows.iter().map(|row| (row[0], row[at]))).stroke(stroke).look(look)
    };
    let chart = Picture::lines(
        "async-copy: the gain of a thread ahead".to_owned(),
        made.outcome.origin.place(),
        [
            Axis::linear("microseconds that a sample takes to decode", ""),
            Axis::linear("throughput, to loading in line", ""),
        ],
        vec![
            line("measured", 5, Stroke::Solid, 0),
            line("(step + load) / the longer of both", 4, Stroke::Dotted, 1),
        ],
    );
    let title = "Load of a batch on the processor, hidden and exposed";
    let definition = "A thread ahead hides the load behind the step, at most all of the shorter of both; it needs a core of its \
                      own.";
    let line = "A thread ahead brings most where a batch takes as long to load as to train on; a load longer than the step needs \
                more threads or cheaper decoding.";
    Ok(vec![Found {
        lines: vec![line.to_owned()],
        chart: Some(("async-copy-load".to_owned(), chart)),
        ..Found::new("hidden_load", title, definition, table)
    }])
}
