//! `paceline links`: what links deliver, and what models would spend on communication over one of
//! them, predicted and, if asked, measured on the emulated link.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;

use paceline_collectives::{Algorithm, Group, Link, NAMED_LINKS, OpKind};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::bench::screen::say;
use crate::bench::sweep;
use crate::choices::models::MODELS;
use crate::cli::{CnnSizes, LinksArgs};
use crate::comm::TransportName;
use crate::links::{LinkRow, ModelRow, overheads, speeds};
use crate::run::resolve::resolve;
use crate::run::spec::RunSpec;
use crate::run::trainer;
use crate::text::plain_table;
use crate::{Failure, Result, launcher};

/// Steps that are made to find a model's computing time, and how many of them do not count.
const STEPS: (usize, usize) = (6, 2);

/// `paceline links`.
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
        (None, _) if !args.cnn.is_empty() => of_cnns(&args.cnn, compute_ms)?,
        (None, false) => of_params(&args.params, compute_ms)?,
        (None, true) if args.measure || compute_ms.is_some() => {
            return usage("--measure and --compute-ms need --params, --model or --cnn".into());
        }
        (None, true) => {
            say(&table_of_links());
            return Ok(0);
        }
    };
    let name = args.link.clone();
    let row = link_row(name, link.bytes_per_s / 1e9, Some(link.latency_s * 1e6), "");
    say(&overheads(&models, args.nproc, &row));
    if args.measure {
        say(&measured(&models, args, link)?);
    }
    Ok(0)
}

fn usage<T>(message: String) -> Result<T> {
    Err(Failure::Usage(message))
}

fn link_row(name: String, gb_s: f64, latency_us: Option<f64>, note: &str) -> LinkRow {
    LinkRow { name, bandwidth_gb_s: gb_s, latency_us, note: note.to_owned() }
}

fn table_of_links() -> String {
    let rows: Vec<LinkRow> = NAMED_LINKS
        .iter()
        .map(|&(name, gb_s, latency_us, note)| {
            link_row(name.to_owned(), gb_s, Some(latency_us), note)
        })
        .collect();
    format!(
        "{}\nEach is in one direction; both can be used at once. Bandwidths are nominal, latencies \
         what well-tuned systems reach.",
        speeds(&rows)
    )
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

/// The models of `--cnn`, by the names that were given.
fn of_cnns(cnns: &[CnnSizes], compute_ms: Option<f64>) -> Result<Vec<ModelRow>> {
    let row = |sizes: &CnnSizes| {
        let channels: Vec<String> = sizes.channels.iter().map(u64::to_string).collect();
        let name = format!("cnn {}:{}", channels.join(","), sizes.hidden);
        let spec = RunSpec::default().with(MODELS.key, "cnn").with("hidden", sizes.hidden);
        of_model(&name, spec.with_values("channels", channels), compute_ms)
    };
    cnns.iter().map(row).collect()
}

/// The true number of parameters of a model, and its computing time: given, or that of a few steps
/// of one rank on synthetic data.
fn of_model(name: &str, model: RunSpec, compute_ms: Option<f64>) -> Result<ModelRow> {
    let (steps, warmup) = STEPS;
    let spec = model.with("nproc", 1).with("epochs", 1).with("steps-per-epoch", steps);
    let spec = spec.with("warmup-steps", warmup).with("quiet", true);
    let (mut config, data) = resolve(&spec, None)?;
    if let Some(compute_ms) = compute_ms {
        let params = config.model.build(data.train.as_ref(), 1)?.layout.num_params() as u64;
        return Ok(ModelRow { name: name.to_owned(), params, compute_ms });
    }
    // The run's summary goes to memory, not to a folder.
    let summary = memfd_create("summary", MemfdFlags::CLOEXEC)
        .map_err(|e| Failure::io("no memory for a summary", e))?;
    config.json = Some(format!("/proc/self/fd/{}", summary.as_raw_fd()).into());
    trainer::run_rank(&config, data, Group::single(), 0, None)?;
    let mut text = String::new();
    File::from(summary)
        .read_to_string(&mut text)
        .map_err(|e| Failure::io("cannot read the summary", e))?;
    let summary: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| Failure::io("cannot read the summary", e))?;
    let number = |key: &str| {
        summary[key].as_f64().ok_or_else(|| Failure::Run(format!("the summary has no {key}")))
    };
    let (params, compute_ms) = (number("params")? as u64, number("compute_ms")?);
    Ok(ModelRow { name: name.to_owned(), params, compute_ms })
}

/// All-reduces of the models' gradients over shared memory, on the emulated link.
fn measured(models: &[ModelRow], args: &LinksArgs, link: Link) -> Result<String> {
    let bench =
        ["bench", "all_reduce", "-n", "5", "-w", "1", "-c", "0", "--style", "lines", "--link"];
    let mut command: Vec<String> = bench.map(str::to_owned).to_vec();
    command.push(args.link.clone());
    let sizes: Vec<u64> = models.iter().map(ModelRow::gradient_bytes).collect();
    let rows = sweep::rows_of(&command, TransportName::Shm, &sizes, args.nproc)?;
    let line = |(model, row): (&ModelRow, &crate::bench::result::Row)| {
        let timing = row.in_place.as_ref().or(row.timing())?;
        let bytes = model.gradient_bytes();
        let predicted = link.time(OpKind::AllReduce, Algorithm::Direct, args.nproc, bytes);
        let (predicted_ms, measured_ms) = (predicted.as_secs_f64() * 1e3, timing.median_us / 1e3);
        let ratio = if predicted_ms > 0.0 { measured_ms / predicted_ms } else { 1.0 };
        Some([
            model.name.clone(),
            format!("{:.2}", bytes as f64 / 1e6),
            format!("{predicted_ms:.3}"),
            format!("{measured_ms:.3}"),
            format!("{ratio:.3}"),
        ])
    };
    let lines: Vec<[String; 5]> = models.iter().zip(&rows).filter_map(line).collect();
    let names =
        ["Model", "Gradients (MB)", "Predicted (ms)", "Measured (ms)", "Measured/predicted"];
    Ok(format!(
        "\nOne all-reduce of all gradients over shm, on the emulated link; predicted = 3 latencies + \
         (bytes x 2(N-1)/N + 88(N-1) of headers) / bandwidth\n{}",
        plain_table(names, 1, &lines)
    ))
}
