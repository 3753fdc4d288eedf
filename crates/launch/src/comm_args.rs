//! Flags about communication that several commands have. Their meaning is defined in
//! [`comm`](crate::comm).

use clap::Args;
use paceline_collectives::{Algorithm, CommLog, Link, NcclOrder};
use paceline_failure::numbers::{at_least, within};

/// The limits of a time limit: a year in seconds cannot overflow when it is added to a time.
const TIMEOUTS_S: (f64, f64) = (1e-3, 3.2e7);

/// Flags about communication.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Communication")]
pub struct CommArgs {
    /// Seconds that an operation, or the rendezvous, may wait for other ranks
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 60.0,
        allow_negative_numbers = true,
        value_parser = within(TIMEOUTS_S.0, TIMEOUTS_S.1),
        help_heading = "Host"
    )]
    pub timeout: f64,
    /// Emulate a slower link: BANDWIDTH,LATENCY as in 10gbit,50us, or a name as 10gbe
    #[arg(long, value_name = "LINK")]
    pub link: Option<Link>,
    /// How tcp reduces: direct, ring, or auto. auto takes the faster one, measured when the group forms
    /// (on an emulated link, by the cost model)
    #[arg(long, value_name = "NAME", default_value = "direct")]
    pub algorithm: Algorithm,
    /// The order in which NCCL's ranks add up: tree, which has the bits of the other transports, or ring, its own
    #[arg(long, value_name = "ORDER", default_value = "tree")]
    pub nccl_order: NcclOrder,
    /// Log each operation on standard error: off, info or trace [default: $PACELINE_COMM_LOG, or off]
    #[arg(long, value_name = "LEVEL")]
    pub comm_log: Option<CommLog>,
    /// Number of hosts that the ranks on this host are divided into, with --transport hybrid [default: 2]
    #[arg(long, value_name = "H", value_parser = at_least::<usize>(1))]
    pub hosts: Option<usize>,
    /// Address at which other hosts reach this one [default: that of the interface towards rank 0]
    #[arg(long, value_name = "ADDRESS", help_heading = "Files and addresses")]
    pub host: Option<String>,
}
