//! Turns the flags about communication into settings, which are checked before any rank starts.

use std::time::Duration;

use paceline_collectives::{Algorithm, COMM_LOG, CommLog, GroupOptions, Link, NcclOrder};
use paceline_failure::{Failure, Result, usage};
use paceline_rendezvous::{Launcher, Placement};
use serde::Serialize;

use crate::device::Device;
use crate::{CommArgs, TransportName};

/// How the ranks of a command talk to each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CommConfig {
    /// Seconds that an operation may wait for other ranks.
    #[serde(rename = "timeout")]
    pub timeout_s: f64,
    /// The link to emulate.
    pub link: Option<Link>,
    /// The all-reduce algorithm of the transport tcp.
    pub algorithm: Algorithm,
    /// The order in which NCCL's ranks add up.
    pub nccl_order: NcclOrder,
    /// How much is logged of each operation.
    #[serde(skip)]
    pub log: CommLog,
    /// With the hybrid transport on one host: the number of hosts that its ranks pretend to be.
    pub hosts: usize,
    /// The address of this host, if it was given.
    pub host: Option<String>,
    /// The threads with which each rank computes.
    #[serde(skip)]
    pub threads: usize,
}

/// Checks the flags for ranks that compute on `device` and use one of `transports`.
pub fn resolve(
    args: &CommArgs,
    device: Device,
    transports: &[TransportName],
) -> Result<CommConfig> {
    let CommArgs { timeout: timeout_s, link, algorithm, nccl_order, .. } = *args;
    if algorithm != Algorithm::Direct && !transports.contains(&TransportName::Tcp) {
        return usage(format!(
            "--algorithm {} applies to --transport tcp only; leave it out, or use that transport",
            algorithm.name()
        ));
    }
    if nccl_order != NcclOrder::Tree && !matches!(device, Device::Cuda(_)) {
        return usage(format!(
            "--nccl-order {}: NCCL connects cards; leave it out, or pass --device cuda",
            nccl_order.name()
        ));
    }
    let log = args.comm_log.map_or_else(
        || {
            let level = std::env::var_os(COMM_LOG).unwrap_or_default();
            let level = level.to_string_lossy().parse();
            level.map_err(|error| Failure::Usage(format!("{COMM_LOG}: {error}")))
        },
        Ok,
    )?;
    let uses_hybrid = transports.contains(&TransportName::Hybrid);
    if args.hosts.is_some() && !uses_hybrid {
        return usage("--hosts applies to --transport hybrid only; leave it out");
    }
    let is_networked = uses_hybrid || transports.contains(&TransportName::Tcp);
    if args.host.is_some() && !is_networked {
        return usage("--host applies to --transport tcp and hybrid only; leave it out");
    }
    let (hosts, host) = (args.hosts.unwrap_or(2), args.host.clone());
    Ok(CommConfig { timeout_s, link, algorithm, nccl_order, log, hosts, host, threads: 1 })
}

impl CommConfig {
    /// The options of a group that has `local_ranks` ranks on this host.
    pub fn options(&self, local_ranks: usize) -> GroupOptions {
        GroupOptions {
            timeout: Duration::from_secs_f64(self.timeout_s),
            algorithm: self.algorithm,
            link: self.link,
            log: self.log,
            ..GroupOptions::for_ranks_of(local_ranks, self.threads)
        }
    }

    /// The reason why `local_ranks` ranks of this host cannot use a transport; `None` if they can.
    pub fn refusal(&self, transport: TransportName, local_ranks: usize) -> Option<String> {
        match transport {
            TransportName::Mpi if !cfg!(feature = "mpi") => Some(WITHOUT_MPI.into()),
            TransportName::Mpi if local_ranks > 1 && !is_under_mpi() => Some(format!(
                "an MPI library's ranks are started by its own launcher: mpirun -n {local_ranks} \
                 paceline ... --transport mpi"
            )),
            TransportName::Hybrid if !local_ranks.is_multiple_of(self.hosts) => Some(format!(
                "{local_ranks} ranks cannot stand for {} hosts with as many ranks on each; pass \
                 another --hosts",
                self.hosts
            )),
            _ => None,
        }
    }
}

/// The error if the transport `mpi` was not built.
pub const WITHOUT_MPI: &str = "this paceline was built without MPI; build it with --features mpi";

/// Whether an MPI library's launcher (or Slurm, which works with them) has started this process.
fn is_under_mpi() -> bool {
    let placement = Placement::from_env().ok().flatten();
    placement.is_some_and(|place| {
        matches!(place.launcher, Launcher::OpenMpi | Launcher::Mpich | Launcher::Slurm)
    })
}
