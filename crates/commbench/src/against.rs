//! `--against torch`: PyTorch's collectives, over Gloo on the processor and over NCCL on cards, measured in turns with ours.
//!
//! Its ranks run `torch_rank.py`. They are started, watched and ended as ranks of paceline are.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use paceline_collectives::{OpKind, ReduceOp};
use paceline_failure::{Failure, Result, usage};
use paceline_files::{Printable, printable};
use paceline_launch::device::Device;
use paceline_launch::launcher::{Launch, launch_within};
use paceline_launch::pinning::{self, RankProcessors};
use serde_json::json;

use super::configuration::Configuration;
use super::load;
use super::operation::Operation;
use super::plan::Plan;
use super::processes::memory_file;
use super::series::Measured;

/// How long an interpreter may take to import PyTorch.
const IMPORT_LIMIT: Duration = Duration::from_secs(120);

/// How long its ranks may take to end after Ctrl-C.
const GRACE: Duration = Duration::from_secs(2);

/// The most bytes of its answer.
const ANSWER_BYTES: u64 = 1000;

/// Prints the version of PyTorch, and whether it has the backend of the first argument.
const PROBE: &str = "import sys; sys.path[:] = [path for path in sys.path if path]; import torch, torch.distributed as d; \
    print('torch', torch.__version__, d.is_available() and getattr(d, f'is_{sys.argv[1]}_available')())";

/// An interpreter that has PyTorch.
#[derive(Debug)]
pub(super) struct Peer {
    python: PathBuf,
    pub(super) backend: &'static str,
    /// The version, for tables.
    pub(super) name: String,
}

impl Peer {
    /// The peer that the flags ask for.
    pub(super) fn resolve(plan: &Plan) -> Result<Option<Self>> {
        if plan.output.against.is_none() {
            return Ok(None);
        }
        let Plan { operation: Operation { kind, redop, .. }, comm, transports, ranks, .. } = plan;
        let refused = [
            ("--link", comm.link.is_some()),
            ("several transports", transports.len() > 1),
            ("--device sim", ranks.device.is_emulated()),
            ("-o avg", kind.reduces() && *redop == ReduceOp::Mean),
            ("a barrier", *kind == OpKind::Barrier),
        ];
        if let Some((flag, _)) = refused.iter().find(|(_, is_given)| *is_given) {
            return usage(format!(
                "--against torch: the two cannot be compared with {flag}; leave one out"
            ));
        }
        let backend = if ranks.device == Device::Cpu { "gloo" } else { "nccl" };
        let venv = std::env::var_os("VIRTUAL_ENV").filter(|own| !own.is_empty());
        let venv = venv.map(|venv| Path::new(&venv).join("bin/python"));
        let candidates: Vec<PathBuf> = match &plan.output.python {
            Some(python) => vec![python.clone()],
            None => venv.into_iter().chain(["python3".into(), "python".into()]).collect(),
        };
        let mut problems = Vec::new();
        for python in candidates {
            match probe(&python, backend) {
                Ok(version) => {
                    let (version, _) = version.split_once('+').unwrap_or((&version, ""));
                    let name = format!("torch {version}");
                    return Ok(Some(Self { python, backend, name }));
                }
                Err(problem) => problems.push(format!("{} {problem}", python.printable())),
            }
        }
        usage(format!(
            "--against torch: {}; pass --python PATH of an interpreter that has PyTorch, or install it (pip install torch)",
            problems.join("; ")
        ))
    }

    /// The times of a round, by size. The ranks may take until `limit`.
    pub(super) fn measure(
        &self,
        configuration: Configuration<'_>,
        sizes: &[u64],
        limit: Duration,
    ) -> Result<Vec<Measured>> {
        let Configuration { plan, nproc, .. } = configuration;
        let (operation, measuring) = (plan.operation, &plan.measuring);
        let [(_lines, lines), (_store, store)] = [memory_file("times")?, memory_file("store")?];
        let pinning = plan.ranks.pin_cores.then(|| pinning::pinning(nproc, 1).ok()).flatten();
        let of_rank = |rank: &RankProcessors| [&rank.compute[..], &rank.beside].concat();
        let processors = pinning.map(|of| of.ranks.iter().map(of_rank).collect::<Vec<_>>());
        let card = if let Device::Cuda(card) = plan.ranks.device { card } else { None };
        let job = json!({
            "op": operation.kind.name(), "redop": operation.redop.nccl_name(), "root": operation.root,
            "dtype": operation.dtype.name(), "backend": self.backend, "card": card, "processors": processors,
            "elements": sizes.iter().map(|&size| operation.elements(size, nproc)).collect::<Vec<_>>(),
            "iters": measuring.iters, "agg_iters": measuring.agg_iters, "warmup_iters": measuring.warmup_iters,
            "check": measuring.check, "timeout_s": plan.comm.timeout_s, "lines": lines, "store": store,
        });
        let script = include_str!("torch_rank.py");
        let command =
            vec![self.python.clone().into(), "-c".into(), script.into(), job.to_string().into()];
        let variables = vec![("OMP_NUM_THREADS", "1".into())];
        let ended = launch_within(
            &Launch { command, num_ranks: nproc, variables, grace: GRACE, ..Launch::default() },
            limit,
        )?;
        if let Some(signal) = ended.signal {
            return Err(Failure::Stopped { signal, message: None, others: Vec::new() });
        }
        let failed = |why: String| {
            Failure::Run(format!("--against torch: {}: {why}", self.python.printable()))
        };
        if ended.code != 0 {
            return Err(failed("a rank failed; its messages are above".to_owned()));
        }
        let text = paceline_files::read_text(&lines, load::MAX_BYTES);
        let text = text.map_err(|error| failed(error.to_string()))?;
        let times = load::from_json(&text).map_err(|(_, problem)| failed(problem))?;
        if times.len() != sizes.len() {
            return Err(failed(format!("it ended with {} of {} times", times.len(), sizes.len())));
        }
        Ok(times.into_iter().map(|of| Measured { name: self.name.clone(), ..of }).collect())
    }
}

/// The version of PyTorch that this interpreter has; or the problem.
fn probe(python: &Path, backend: &str) -> std::result::Result<String, String> {
    let cannot = |error: std::io::Error| format!("cannot be started ({error})");
    let (answer, _) = memory_file("answer").map_err(|error| error.to_string())?;
    let mut child = Command::new(python)
        .args(["-c", PROBE, backend])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(answer.try_clone().map_err(cannot)?)
        .spawn()
        .map_err(cannot)?;
    let deadline = Instant::now() + IMPORT_LIMIT;
    let len = || answer.metadata().map_or(0, |of| of.len());
    while child.try_wait().map_err(cannot)?.is_none()
        && len() <= ANSWER_BYTES
        && Instant::now() < deadline
    {
        sleep(Duration::from_millis(20));
    }
    let has_ended = child.try_wait().is_ok_and(|status| status.is_some());
    let _ = child.kill();
    let _ = child.wait();
    let mut bytes = vec![0; len().min(ANSWER_BYTES) as usize];
    answer.read_exact_at(&mut bytes, 0).map_err(cannot)?;
    let text = String::from_utf8_lossy(&bytes);
    match text.split_whitespace().collect::<Vec<_>>()[..] {
        ["torch", version, "True"] => Ok(printable(version).into_owned()),
        ["torch", version, _] => Err(format!("has torch {} without {backend}", printable(version))),
        [] if !has_ended => Err(format!("did not import torch in {} s", IMPORT_LIMIT.as_secs())),
        _ => Err("cannot import torch".to_owned()),
    }
}
