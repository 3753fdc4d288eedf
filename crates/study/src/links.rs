//! `paceline links`: the speeds of links, and the time that models would spend on communication over a
//! link. That time is computed and, if asked for, measured on the emulated link.
//!
//! This file knows neither how a link is emulated nor how a model is built.

pub mod args;

use std::fs::File;
use std::os::fd::AsRawFd;

use paceline_choices::models::{Defaults, MODELS};
use paceline_choices::strategies::default_caps;
use paceline_collectives::{Algorithm, Cost, Group, HEADER_BYTES, Link, NAMED_LINKS, OpKind};
use paceline_commbench::processes::rows_of;
use paceline_failure::{Failure, Result};
use paceline_host::text::{hundredths, line_width, plain_table, plural, say, thousands};
use paceline_launch::launcher;
use paceline_run::resolve::resolve;
use paceline_run::setup::Host;
use paceline_run::trainer;
use paceline_settings::named::TransportName;
use paceline_settings::spec::RunSpec;
use paceline_strategies::BucketCaps;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Deserialize;

use self::args::{CnnSizes, LinksArgs};
use crate::predict::efficiency::efficiency_pct;
use crate::predict::model::Step;
use crate::predict::stated::StatedModel;

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
    /// The sizes of its buckets.
    caps: BucketCaps,
}

impl ModelRow {
    fn gradient_bytes(&self) -> u64 {
        4 * self.params
    }

    fn gradient_mb(&self) -> String {
        format!("{:.2}", self.gradient_bytes() as f64 / 1e6)
    }

    /// Milliseconds of one all-reduce of all gradients, by the cost model of operations.
    fn comm_ms(&self, over: &Over) -> f64 {
        over.all_reduce_ms(self.gradient_bytes())
    }

    /// The percentage of the step that is communication, if none of it is hidden: `comm / (comm +
    /// compute)`. 0 if both are 0.
    fn comm_pct(&self, over: &Over) -> f64 {
        let comm = self.comm_ms(over);
        let step = comm + self.compute_ms;
        if step > 0.0 { 100.0 * comm / step } else { 0.0 }
    }

    /// The percentage of the step that is exposed communication, if `ddp` sends buckets during the backward pass. The
    /// step is that of `paceline predict --gradient-bytes`.
    fn exposed_pct(&self, over: &Over) -> Result<f64> {
        let (layout, calibration) =
            StatedModel::with_usual_backward(self.gradient_bytes(), self.compute_ms).model();
        let step = Step::new(&calibration, &layout, self.caps)?;
        let step_ms = step.step_ms(|bytes| over.all_reduce_ms(bytes));
        Ok(100.0 - efficiency_pct(self.compute_ms, step_ms))
    }
}

/// What the gradients travel over: a link between some ranks, and the algorithm of the all-reduce.
struct Over<'a> {
    /// The link, as the user named it.
    name: &'a str,
    link: Link,
    world_size: usize,
    /// [`Algorithm::Auto`] is never in it: the cost model has chosen.
    algorithm: Algorithm,
}

impl Over<'_> {
    fn all_reduce_ms(&self, bytes: u64) -> f64 {
        let Self { link, world_size, algorithm, .. } = self;
        link.time(OpKind::AllReduce, *algorithm, *world_size, bytes).as_secs_f64() * 1e3
    }

    /// Number of latencies in an all-reduce.
    fn steps(&self) -> u32 {
        Cost::of(OpKind::AllReduce, self.algorithm, self.world_size, 0).steps
    }
}

/// Runs `paceline links`.
pub fn links_command(args: &LinksArgs) -> Result<u8> {
    let link: Link = args.link.parse().map_err(|e| Failure::Usage(format!("--link: {e}")))?;
    let asked: Algorithm =
        args.algorithm.parse().map_err(|e| Failure::Usage(format!("--algorithm: {e}")))?;
    launcher::check_num_ranks("--nproc", args.nproc)?;
    // The size of the message makes no difference to the choice.
    let algorithm = asked.recommended(OpKind::AllReduce, args.nproc, 0, &link);
    let over = Over { name: &args.link, link, world_size: args.nproc, algorithm };
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
    say(&costs(&models, &over)?);
    if args.measure {
        say(&measured(&models, &over)?);
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
        let caps = default_caps(&Defaults::default());
        Ok(ModelRow { name: "given".to_owned(), params: params as u64, compute_ms, caps })
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
    let caps = config.strategy.caps_for_ddp();
    if let Some(compute_ms) = compute_ms {
        let params = config.model.build(data.train.as_ref(), 1)?.layout.num_params() as u64;
        return Ok(ModelRow { name, params, compute_ms, caps });
    }
    // The run's summary goes to a file in memory, not to a folder.
    let file = memfd_create("summary", MemfdFlags::CLOEXEC)
        .map_err(|e| Failure::io("no memory for a summary", e))?;
    config.json = Some(format!("/proc/self/fd/{}", file.as_raw_fd()).into());
    trainer::run_rank(&config, data, Group::single()?, 0, || Ok(None), Host::default())?;
    #[derive(Deserialize)]
    struct Summary {
        params: u64,
        compute_ms: f64,
    }
    let summary: Summary = serde_json::from_reader(File::from(file))
        .map_err(|e| Failure::io("cannot read the summary", e))?;
    Ok(ModelRow { name, params: summary.params, compute_ms: summary.compute_ms, caps })
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
    plain_table(["Link", "Note", "GB/s", "Gbit/s", "Latency (us)"], 2, &lines, line_width())
}

/// The table of what models would spend on communication.
fn costs(models: &[ModelRow], over: &Over) -> Result<String> {
    let line = |model: &ModelRow| {
        Ok([
            model.name.clone(),
            thousands(model.params),
            model.gradient_mb(),
            format!("{:.3}", model.compute_ms),
            format!("{:.3}", model.comm_ms(over)),
            format!("{:.1}", model.comm_pct(over)),
            format!("{:.1}", model.exposed_pct(over)?),
        ])
    };
    let lines: Vec<[String; 7]> = models.iter().map(line).collect::<Result<_>>()?;
    let names =
        ["Model", "Parameters", "Gradients MB", "Compute ms", "Comm. ms", "Comm. %", "Exposed %"];
    let Over { name, link, world_size, algorithm } = over;
    Ok(format!(
        "{name}: {} GB/s and {} us between {}\n\
         Comm. is one all-reduce of all gradients, with the algorithm {}:\n  \
         {} x latency + bytes x 2(N-1)/N / bandwidth, and headers of {HEADER_BYTES} bytes\n\
         Comm. % is comm. / (comm. + compute), as if nothing were hidden.\n\
         Exposed is the part of the step that ddp does not hide. It sends buckets during\n\
         the backward pass, the last two thirds of compute, and each pays the latency.\n\
         Exposed is 100 % minus the efficiency in `paceline predict --gradient-bytes`.\n\n{}",
        hundredths(link.bytes_per_s / 1e9),
        hundredths(link.latency_s * 1e6),
        plural(*world_size, "rank"),
        algorithm.name(),
        over.steps(),
        plain_table(names, 1, &lines, line_width())
    ))
}

/// The table of measured times: one all-reduce of each model's gradients on the emulated link. Only tcp has the
/// algorithm ring.
fn measured(models: &[ModelRow], over: &Over) -> Result<String> {
    let transport = match over.algorithm {
        Algorithm::Ring => TransportName::Tcp,
        _ => TransportName::Shm,
    };
    let bench = "bench all_reduce --iters 5 -w 1 -c 0 --style lines --algorithm";
    let named = [over.algorithm.name(), "--transport", transport.name(), "--link", over.name];
    let bench = bench.split(' ').chain(named);
    let bench: Vec<&str> = bench.collect();
    let sizes: Vec<u64> = models.iter().map(ModelRow::gradient_bytes).collect();
    let rows = rows_of(&bench, transport, &sizes, over.world_size)?;
    let mut lines = Vec::new();
    for (model, row) in models.iter().zip(&rows) {
        let Some(timing) = row.timing() else { continue };
        let (computed_ms, measured_ms) = (model.comm_ms(over), timing.median_us / 1e3);
        let ratio = if computed_ms > 0.0 { measured_ms / computed_ms } else { 1.0 };
        let times = [computed_ms, measured_ms, ratio].map(|value| format!("{value:.3}"));
        let [computed_ms, measured_ms, ratio] = times;
        lines.push([model.name.clone(), model.gradient_mb(), computed_ms, measured_ms, ratio]);
    }
    let names = ["Model", "Gradients MB", "Comm. ms", "Measured ms", "Measured/comm."];
    Ok(format!(
        "\nThe same all-reduce, measured over {} on the emulated link\n{}",
        transport.name(),
        plain_table(names, 1, &lines, line_width())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, params: u64, compute_ms: f64) -> ModelRow {
        let caps = BucketCaps::new(25 << 20);
        ModelRow { name: name.to_owned(), params, compute_ms, caps }
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

    fn over(name: &str, world_size: usize, algorithm: Algorithm) -> Over<'_> {
        Over { name, link: name.parse().unwrap(), world_size, algorithm }
    }

    #[test]
    fn models_pay_for_their_gradients() {
        let models = [model("small", 109_386, 2.0), model("large", 25_557_032, 180.0)];
        let over = over("10gbit,50us", 4, Algorithm::Direct);
        insta::assert_snapshot!(costs(&models, &over).unwrap());
    }

    #[test]
    fn comm_pct_follows_its_formula() {
        // 100 MB and a header of 88 bytes at 1.25 GB/s between 2 ranks: 80 ms, and three latencies.
        let model = model("m", 25_000_000, 20.0);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a}, not {b}");
        let header_ms = 88.0 / 1.25e6;
        for (latency, latency_ms) in [("0us", 0.0), ("50us", 0.05), ("50000us", 50.0)] {
            let name = format!("10gbit,{latency}");
            let comm_ms = 3.0 * latency_ms + 80.0 + header_ms;
            let over = over(&name, 2, Algorithm::Direct);
            close(model.comm_ms(&over), comm_ms);
            close(model.comm_pct(&over), 100.0 * comm_ms / (comm_ms + 20.0));
        }
        // Four ranks in a ring: seven latencies, half as many bytes again, and three headers.
        let ring = over("10gbit,1ms", 4, Algorithm::Ring);
        close(model.comm_ms(&ring), 7.0 + 120.0 + 3.0 * header_ms);
        let alone = over("10gbit,1ms", 1, Algorithm::Direct);
        assert_eq!(model.comm_pct(&alone), 0.0);
        assert_eq!(model.exposed_pct(&alone).unwrap(), 0.0);
        assert_eq!(ModelRow { compute_ms: 0.0, ..model }.comm_pct(&alone), 0.0);
    }
    #[test]
    fn what_ddp_hides_is_not_exposed() {
        let model = model("m", 25_600_000, 180.0);
        let exposed = |name: &str| model.exposed_pct(&over(name, 2, Algorithm::Direct)).unwrap();
        // 128 parts of 0.8 MB become final in 120 ms, and 1 ms carries 100 MB. Buckets have 2, 33, 33, 33 and 27 parts.
        // The last one, of 21.6 MB, is final when the backward pass ends.
        let bucket_ms = (21.6e6 + 88.0) / 1e8;
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a}, not {b}");
        close(exposed("100GB/s,0us"), 100.0 * bucket_ms / (180.0 + bucket_ms));
        let slower_ms = bucket_ms + 3.0;
        close(exposed("100GB/s,1ms"), 100.0 * slower_ms / (180.0 + slower_ms));
        // With 50 ms of latency, the five buckets and the sums of the loss wait for each other from the begin of the
        // backward pass: 6 x 150 ms, and 102.4 MB.
        let queue_ms = 60.0 + 900.0 + 1.024 + (24.0 + 6.0 * 88.0) / 1e8;
        close(exposed("100GB/s,50ms"), 100.0 * (queue_ms - 180.0) / queue_ms);
    }
}
