//! `paceline links`: the speeds of links, and the time that models would spend on communication over a
//! link. That time is computed and, if asked for, measured on the emulated link.
//!
//! This file knows neither how a link is emulated nor how a model is built.

use std::fs::File;
use std::os::fd::AsRawFd;

use paceline_collectives::{Algorithm, Group, Link, NAMED_LINKS, OpKind};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Deserialize;

use crate::bench::processes::rows_of;
use crate::bench::result::bus_factor;
use crate::choices::models::MODELS;
use crate::cli::links::{CnnSizes, LinksArgs};
use crate::run::named::TransportName;
use crate::run::resolve::resolve;
use crate::run::spec::RunSpec;
use crate::run::trainer::{self, Host};
use crate::text::{hundredths, plain_table, say, thousands};
use crate::{Failure, Result, launcher};

/// Steps that are run to measure a model's computing time, and how many of them are warm-up.
const STEPS: (usize, usize) = (6, 2);

/// A model, and the time that a rank computes in one of its steps.
#[derive(Clone, Debug, PartialEq)]
struct ModelRow {
    name: String,
    /// Number of parameters. Each has a gradient of four bytes.
    params: u64,
    /// Computing time of a step, in milliseconds.
    compute_ms: f64,
}

impl ModelRow {
    fn gradient_bytes(&self) -> u64 {
        4 * self.params
    }

    fn gradient_mb(&self) -> String {
        format!("{:.2}", self.gradient_bytes() as f64 / 1e6)
    }

    /// Milliseconds that `world_size` ranks need to all-reduce their gradients over a link: `bytes x
    /// 2(N-1)/N / bandwidth`. The latency of the link is left out, because it is small compared with the
    /// time for megabytes of gradients.
    fn comm_ms(&self, world_size: usize, link_gb_s: f64) -> f64 {
        let factor = bus_factor("all_reduce", world_size).unwrap_or(0.0);
        self.gradient_bytes() as f64 * factor / link_gb_s / 1e6
    }

    /// The percentage of the step that is communication, if none of it is hidden: `comm / (comm +
    /// compute)`. 0 if both are 0.
    fn overhead_pct(&self, world_size: usize, link_gb_s: f64) -> f64 {
        let comm = self.comm_ms(world_size, link_gb_s);
        let step = comm + self.compute_ms;
        if step > 0.0 { 100.0 * comm / step } else { 0.0 }
    }
}

/// Runs `paceline links`.
pub fn links_command(args: &LinksArgs) -> Result<u8> {
    let link: Link = args.link.parse().map_err(|e| Failure::Usage(format!("--link: {e}")))?;
    launcher::check_num_ranks("--nproc", args.nproc)?;
    let compute_ms = args.compute_ms;
    if let Some(ms) = compute_ms.filter(|ms| !(*ms >= 0.0 && ms.is_finite())) {
        return usage(format!("--compute-ms {ms}: pass milliseconds, zero or more"));
    }
    if let (Some(flag), None) = (args.sizes.0.keys().next(), &args.model) {
        return usage(match args.cnn.is_empty() {
            true => format!("--{flag} needs --model {}", MODELS.readers(flag).join(" or ")),
            false => format!("--{flag} belongs to --model; a --cnn has its sizes in itself"),
        });
    }
    let models = match (&args.model, args.params.is_empty()) {
        (Some(model), _) => {
            vec![of_model(model, args.sizes.0.with(MODELS.key, model), compute_ms)?]
        }
        (None, _) if !args.cnn.is_empty() => {
            args.cnn.iter().map(|sizes| of_cnn(sizes, compute_ms)).collect::<Result<_>>()?
        }
        (None, false) => of_params(&args.params, compute_ms)?,
        (None, true) if args.measure || compute_ms.is_some() => {
            return usage("--measure and --compute-ms need --params, --model or --cnn".into());
        }
        (None, true) => {
            say(&speeds(&NAMED_LINKS));
            say(
                "Each is in one direction; both can be used at once. Bandwidths are nominal, latencies \
                 what well-tuned systems reach.",
            );
            return Ok(0);
        }
    };
    say(&overheads(&models, args.nproc, &args.link, link.bytes_per_s / 1e9));
    if args.measure {
        say(&measured(&models, args, link)?);
    }
    Ok(0)
}

fn usage<T>(message: String) -> Result<T> {
    Err(Failure::Usage(message))
}

fn of_params(params: &[f64], compute_ms: Option<f64>) -> Result<Vec<ModelRow>> {
    let Some(compute_ms) = compute_ms else {
        return usage("--params needs --compute-ms, the computing time of a step".into());
    };
    let row = |&params: &f64| {
        if !(1.0..=1e13).contains(&params) || params.fract() != 0.0 {
            return usage(format!(
                "--params {params}: pass a whole number of parameters, as 25.6e6"
            ));
        }
        Ok(ModelRow { name: "given".to_owned(), params: params as u64, compute_ms })
    };
    params.iter().map(row).collect()
}

/// A model of `--cnn`. Its name repeats the sizes that were given.
fn of_cnn(sizes: &CnnSizes, compute_ms: Option<f64>) -> Result<ModelRow> {
    let channels: Vec<String> = sizes.channels.iter().map(u64::to_string).collect();
    let name = format!("cnn {}:{}", channels.join(","), sizes.hidden);
    let spec = RunSpec::default().with(MODELS.key, "cnn").with("hidden", sizes.hidden);
    of_model(&name, spec.with_values("channels", channels), compute_ms)
}

/// Counts the parameters of a model. Its computing time is `compute_ms`, or else it is measured with a
/// few steps of one rank on synthetic data.
fn of_model(name: &str, model: RunSpec, compute_ms: Option<f64>) -> Result<ModelRow> {
    let name = name.to_owned();
    let (steps, warmup) = STEPS;
    let spec = model.with("nproc", 1).with("epochs", 1).with("steps-per-epoch", steps);
    let spec = spec.with("warmup-steps", warmup).with("quiet", true);
    let (mut config, data) = resolve(&spec, None)?;
    if let Some(compute_ms) = compute_ms {
        let params = config.model.build(data.train.as_ref(), 1)?.layout.num_params() as u64;
        return Ok(ModelRow { name, params, compute_ms });
    }
    // The run's summary goes to a file in memory, not to a folder.
    let file = memfd_create("summary", MemfdFlags::CLOEXEC)
        .map_err(|e| Failure::io("no memory for a summary", e))?;
    config.json = Some(format!("/proc/self/fd/{}", file.as_raw_fd()).into());
    trainer::run_rank(&config, data, Group::single()?, 0, None, Host::default())?;
    #[derive(Deserialize)]
    struct Summary {
        params: u64,
        compute_ms: f64,
    }
    let summary: Summary = serde_json::from_reader(File::from(file))
        .map_err(|e| Failure::io("cannot read the summary", e))?;
    Ok(ModelRow { name, params: summary.params, compute_ms: summary.compute_ms })
}

/// The table of link speeds. A link has a name, a bandwidth in one direction in GB/s of 1e9 bytes, the
/// time of its smallest message in microseconds, and a note.
fn speeds(links: &[(&str, f64, f64, &str)]) -> String {
    let line = |&(name, gb_s, latency_us, note): &(&str, f64, f64, &str)| {
        let numbers = [gb_s, 8.0 * gb_s, latency_us].map(|value| hundredths(value).to_string());
        let [gb_s, gbit_s, latency_us] = numbers;
        [name.to_owned(), note.to_owned(), gb_s, gbit_s, latency_us]
    };
    let lines: Vec<[String; 5]> = links.iter().map(line).collect();
    plain_table(["Link", "Note", "GB/s", "Gbit/s", "Latency (us)"], 2, &lines)
}

/// The table of what models would spend on communication between `world_size` ranks over a link.
fn overheads(models: &[ModelRow], world_size: usize, link: &str, link_gb_s: f64) -> String {
    let line = |model: &ModelRow| {
        [
            model.name.clone(),
            thousands(model.params),
            model.gradient_mb(),
            format!("{:.3}", model.compute_ms),
            format!("{:.3}", model.comm_ms(world_size, link_gb_s)),
            format!("{:.1}", model.overhead_pct(world_size, link_gb_s)),
        ]
    };
    let lines: Vec<[String; 6]> = models.iter().map(line).collect();
    let names =
        ["Model", "Parameters", "Gradients (MB)", "Compute (ms)", "Comm. (ms)", "Overhead (%)"];
    format!(
        "{link} at {} GB/s, {world_size} ranks\ncommunication = bytes x 2(N-1)/N / bandwidth, \
         overhead = communication / (communication + compute)\n{}",
        hundredths(link_gb_s),
        plain_table(names, 1, &lines)
    )
}

/// The table of measured times: one all-reduce of each model's gradients over shared memory, on the
/// emulated link.
fn measured(models: &[ModelRow], args: &LinksArgs, link: Link) -> Result<String> {
    let bench = "bench all_reduce -n 5 -w 1 -c 0 --style lines --link";
    let bench: Vec<&str> = bench.split(' ').chain([args.link.as_str()]).collect();
    let sizes: Vec<u64> = models.iter().map(ModelRow::gradient_bytes).collect();
    let rows = rows_of(&bench, TransportName::Shm, &sizes, args.nproc)?;
    let mut lines = Vec::new();
    for (model, row) in models.iter().zip(&rows) {
        let Some(timing) = row.timing() else { continue };
        let bytes = model.gradient_bytes();
        let predicted = link.time(OpKind::AllReduce, Algorithm::Direct, args.nproc, bytes);
        let (predicted_ms, measured_ms) = (predicted.as_secs_f64() * 1e3, timing.median_us / 1e3);
        let ratio = if predicted_ms > 0.0 { measured_ms / predicted_ms } else { 1.0 };
        let times = [predicted_ms, measured_ms, ratio].map(|value| format!("{value:.3}"));
        let [predicted_ms, measured_ms, ratio] = times;
        lines.push([model.name.clone(), model.gradient_mb(), predicted_ms, measured_ms, ratio]);
    }
    let names =
        ["Model", "Gradients (MB)", "Predicted (ms)", "Measured (ms)", "Measured/predicted"];
    Ok(format!(
        "\nOne all-reduce of all gradients over shm, on the emulated link; predicted = 2 latencies + \
         bytes x 2(N-1)/N / bandwidth\n{}",
        plain_table(names, 1, &lines)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, params: u64, compute_ms: f64) -> ModelRow {
        ModelRow { name: name.to_owned(), params, compute_ms }
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
    fn models_pay_for_their_gradients() {
        let models = [model("small", 109_386, 2.0), model("large", 25_557_032, 180.0)];
        insta::assert_snapshot!(overheads(&models, 4, "10 GbE", 1.25), @r"
        10 GbE at 1.25 GB/s, 4 ranks
        communication = bytes x 2(N-1)/N / bandwidth, overhead = communication / (communication + compute)
        Model  Parameters  Gradients (MB)  Compute (ms)  Comm. (ms)  Overhead (%)
        -----  ----------  --------------  ------------  ----------  ------------
        small     109,386            0.44         2.000       0.525          20.8
        large  25,557,032          102.23       180.000     122.674          40.5
        ");
    }

    #[test]
    fn overhead_follows_its_formula() {
        // 100 MB at 1.25 GB/s between 2 ranks: 80 ms.
        let model = model("m", 25_000_000, 20.0);
        assert!((model.comm_ms(2, 1.25) - 80.0).abs() < 1e-9);
        assert!((model.overhead_pct(2, 1.25) - 80.0).abs() < 1e-9);
        assert_eq!(model.overhead_pct(1, 1.25), 0.0);
        assert_eq!(ModelRow { compute_ms: 0.0, ..model }.overhead_pct(1, 1.25), 0.0);
    }
}
